"""CUDA kernels: sources in csrc/, one thin CuPy wrapper each. CuPy is imported when one is used."""
