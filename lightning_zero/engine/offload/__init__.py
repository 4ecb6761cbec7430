"""Model states and activations kept outside of the device's memory."""
