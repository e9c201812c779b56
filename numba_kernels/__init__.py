"""CPU kernels, compiled by Numba: arrays and scalars in, arrays out.

Weights are float32, float16 or bfloat16 matrices whose rows are contiguous. NumPy and Numba know
no bfloat16 and Numba's CPU target no float16, so a kernel tells the formats apart by the array's
dtype: float32 = itself, uint16 = float16 bits, int16 = bfloat16 bits.

A function of this package without a leading underscore either checks its arguments (the wrappers,
ValueError on any mismatch) or says in its docstring that it checks nothing (kernels, for the
serving loops, whose arguments were checked when the weights were loaded).

Kernels have their `njit` from `compiler`, which imports Numba; formats and checks do without.
"""
