"""What a device does late, on a device that is emulated: the engine waits for all that it uses.

The engine's code for GPUs (streams and events, pinned memory, collectives that return before they are done) runs here
as it does there; device.cpp says what is emulated, and how it finds what is not in order. On a GPU itself: tests/gpu.
"""
