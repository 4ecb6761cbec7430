"""The examples, the benchmarks and the package itself, each run in separate processes, as a user runs it."""
