"""Every state that a job can carry, beyond where it lies: dtypes, options, kinds of layers, and what nobody knows."""
