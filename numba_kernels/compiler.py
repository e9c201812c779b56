"""The `njit` of this package: Numba's, told how far kernels are compiled and where they are kept.

Importing Numba takes half a second. What only reads headers, counts bytes or checks options needs
`formats` and `checks` alone, and so never comes here.
"""

from numba import njit as njit

from hotcold.numba_kernels.numba_parts import (
    has_naming_parts,
    is_known_numba,
    use_numbas_cache,
)

if has_naming_parts():
    from hotcold.numba_kernels.content_names import name_by_content

    name_by_content()
if is_known_numba():
    from hotcold.numba_kernels.called_kernels import compile_called_kernels
    from hotcold.numba_kernels.one_compiler import share_compilers

    compile_called_kernels()
    share_compilers()
else:
    use_numbas_cache()
