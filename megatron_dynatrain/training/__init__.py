"""The seam with Megatron's own training loop: the only code that imports `megatron.training`."""
