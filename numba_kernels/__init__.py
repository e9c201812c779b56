"""CPU kernels, compiled by Numba: arrays and scalars in, arrays out.

Weights are matrices with contiguous rows. A kernel identifies their format by dtype, since NumPy
has no bfloat16 and Numba's CPU target no float16: `formats`.

Wrappers check their arguments (ValueError on any mismatch). Kernels check nothing and say so: they
are called from service loops, whose arguments were checked when weights were loaded.

Kernels import `njit` from `compiler`, which imports Numba; `formats` and `checks` do not.
"""
