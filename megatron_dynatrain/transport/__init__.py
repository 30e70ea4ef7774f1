"""Moving the bytes of a plan: torch only, no Megatron."""
