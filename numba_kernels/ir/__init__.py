"""Intrinsics in LLVM vector IR: what LLVM does not make of Numba's loops by itself."""
