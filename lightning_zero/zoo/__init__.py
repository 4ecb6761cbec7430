"""Models and data that the `train` command, the examples and the benchmarks use: ordinary Lightning code throughout."""
