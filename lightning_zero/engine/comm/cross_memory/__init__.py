"""A faster implementation of the two operations for CPU ranks of one machine, which read each other's memory."""
