"""Plans of the memory, traffic and time that a training run needs, made by running the real engine on fake tensors."""
