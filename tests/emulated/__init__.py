"""Tests on an emulated device, whose work completes late: the engine waits for everything that it uses.

The engine's code for GPUs (streams and events, pinned memory, collectives that return before they are done) runs here
as on a GPU; device.cpp says what is emulated, and how it finds ordering errors. Tests on a real GPU are in tests/gpu.
"""
