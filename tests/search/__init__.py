"""Random programs over optimizers, units and gradients, each compared with plain modules and averaged gradients.

``programs`` draws them, ``averaged`` is the reference, ``execution`` runs one program on both.
"""
