"""The Hydra config groups, importable as `lightning_zero.conf`: see train.yaml."""
