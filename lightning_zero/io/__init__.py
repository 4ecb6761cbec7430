"""Files and their replacement, labels of creators, values as text and JSON, checks of values, and suggestions."""
