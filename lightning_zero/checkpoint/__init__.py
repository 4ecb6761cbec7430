"""Checkpoints by parameter name and full shape, whatever wrote them: their form, how they are written and read."""
