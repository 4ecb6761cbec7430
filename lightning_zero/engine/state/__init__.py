"""Buckets: flat buffers of gathered parameters and of gradients, and this rank's shards of both."""
