"""The Virtual Parameter Space: logical tensors, and which rank of a layout holds which part of them (pure)."""
