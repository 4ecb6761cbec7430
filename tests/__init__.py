"""The tests, as a specification: a test's name is a sentence about behaviour."""
