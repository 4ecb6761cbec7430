"""The numbers: what is trained, communicated and held in memory, against DistributedDataParallel and the formulas."""
