"""The `lightning-zero` command, its configuration, models and data."""
