"""Numbers, communication and memory, compared with DistributedDataParallel and the paper's formulas."""
