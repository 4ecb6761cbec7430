"""Execution of forward and backward: scheduling of gathers, gradient reduction, autograd and compile hooks."""
