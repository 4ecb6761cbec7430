"""Communication between ranks: the only room of the package that calls torch.distributed."""
