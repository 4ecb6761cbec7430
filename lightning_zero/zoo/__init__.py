"""Models and data for the `train` command, the examples and the benchmarks, in ordinary Lightning code."""
