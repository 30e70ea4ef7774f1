"""Multi-process tests: one server process imports torch and Megatron once and forks the ranks of every case."""
