"""Random programs over optimizers, units and gradients, each compared with plain modules and averaged gradients.

``programs`` draws them, ``averaged`` is what they are compared with, ``execution`` runs one on both.
"""
