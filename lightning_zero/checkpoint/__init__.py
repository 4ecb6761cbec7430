"""Save, open, verify and convert checkpoints, which store tensors by parameter name in their full shape."""
