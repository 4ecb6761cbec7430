"""Offload of model states: storage outside of the device's memory, and updates of offloaded states."""
