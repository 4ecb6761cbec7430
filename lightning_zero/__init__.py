"""ZeRO as a Lightning strategy."""
