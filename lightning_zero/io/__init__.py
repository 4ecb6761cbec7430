"""Files on disk and their replacement, labels that say which process made them, sizes and suggestions as text."""
