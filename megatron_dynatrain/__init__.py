"""Change the parallel layout of a running Megatron pretraining job between two steps, bit for bit."""

__version__ = "0.1.0"
