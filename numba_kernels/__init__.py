"""CPU kernels, compiled by Numba: arrays and scalars in, arrays out.

Weights are float32, float16 or bfloat16 matrices whose rows are contiguous. NumPy and Numba know
no bfloat16 and Numba's CPU target no float16, so a kernel tells the formats apart by the array's
dtype: float32 = itself, uint16 = float16 bits, int16 = bfloat16 bits.

A function of this package without a leading underscore either checks its arguments (the wrappers,
ValueError on any mismatch) or says in its docstring that it checks nothing (kernels, for the
serving loops, whose arguments were checked when the weights were loaded).

Compiled kernels are kept on disk as `kernel_cache` says.
"""

import numba

from numba_kernels.numba_parts import has_cache_parts, has_compiling_parts, use_numbas_cache

if has_compiling_parts():
    from numba_kernels.called_kernels import compile_called_kernels

    compile_called_kernels()
if has_cache_parts():
    from numba_kernels.one_compiler import share_compilers

    numba.config.CACHE_LOCATOR_CLASSES = ",".join(  # type: ignore[attr-defined]
        [
            "numba_kernels.one_compiler.SourceHashLocator",
            "UserProvidedCacheLocator",
            "InTreeCacheLocator",
            "UserWideCacheLocator",
            "IPythonCacheLocator",
            "ZipCacheLocator",
        ]
    )
    share_compilers()
else:
    use_numbas_cache()
