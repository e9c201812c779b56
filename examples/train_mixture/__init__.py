"""How a small mixture of ReGLU experts is trained, and what its routes are like."""
