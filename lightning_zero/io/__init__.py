"""Files on disk, and labels that say which process made them."""
