"""Vector code written as LLVM IR: what LLVM does not make of Numba's loops by itself."""
