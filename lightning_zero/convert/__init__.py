"""Readers for checkpoints of DeepSpeed and FSDP."""
