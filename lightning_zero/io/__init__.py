"""Files on disk, labels that say which process made them, and suggestions for misspelt names."""
