"""Large language models on one ordinary computer, in Python, on Ray.

The packages of this distribution are `hotcold.actors`, `hotcold.model` and so on. In a checkout
their folders stand at its top, and this folder has a symbolic link to each.
"""

__version__ = "0.1.0"
