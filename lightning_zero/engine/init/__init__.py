"""Initialisation of a sharded module: sources of values, space for them, and sharding unit by unit."""
