"""What existing projects do with a Trainer, compared with DDP: one case per behaviour."""
