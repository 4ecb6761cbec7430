"""Files on disk and their replacement, labels that identify a file's creator, sizes and suggestions as text."""
