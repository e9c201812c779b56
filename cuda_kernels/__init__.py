"""CUDA kernels: sources in csrc/, each with a thin CuPy wrapper. CuPy is imported on first use."""
