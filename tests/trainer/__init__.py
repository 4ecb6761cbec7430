"""What existing projects do with a Trainer, held against DDP: a case a behaviour."""
