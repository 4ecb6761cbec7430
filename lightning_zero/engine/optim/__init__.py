"""Master weights, the optimizer step, and optimizer state in torch's ordinary form."""
