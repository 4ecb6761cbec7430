"""What a Trainer takes in addition to its strategy. This file imports nothing: strategies import ``restarts``."""
