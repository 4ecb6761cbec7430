"""Offload of model states: storage outside the device's memory, and updates of offloaded states."""
