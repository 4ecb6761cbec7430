"""The examples, the benchmarks and the package itself, each run as its user runs it: in processes of its own."""
