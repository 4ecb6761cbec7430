"""What a training would take, found by running the real engine on fake tensors: memory, traffic, time."""
