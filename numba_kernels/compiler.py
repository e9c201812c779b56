"""The `njit` of this package: Numba's, told how far kernels are compiled and where they are kept.

Importing Numba takes half a second. What only reads headers, counts bytes or checks options needs
`formats` and `checks` alone, and so never comes here.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit as njit
from numba.extending import overload

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

Chooser = TypeVar("Chooser", bound=Callable[..., Any])


def by_types(choose: Chooser, inline: str = "never") -> Chooser:
    """A function for compiled code: what `choose` returns for the types of its arguments.

    Another function, of arguments of the same names, with which Numba compiles the call.
    """

    @functools.wraps(choose)
    def in_python(*arguments: object) -> None:
        raise NotImplementedError(f"{choose.__name__}() is for compiled code")

    overload(in_python, inline=inline)(choose)
    return in_python  # type: ignore[return-value]


inlined_by_types = functools.partial(by_types, inline="always")
