"""Names of compiled functions that are made of what functions and types are.

Numba numbers functions and records in the order in which a process meets them, and names have these
numbers. Code that one process keeps on disk is linked by others, by its names: there a name stands
for the same function in every process, and for no other.

A function is its code and what it closes over. What its module's globals hold is in no name, so
this is for sources that are in the key of the cache: those of this package, and Numba's. Any other
function has a name that no other process gives.

This leans on parts of Numba that are its own (`numba_kernels.numba_parts`).
"""

import hashlib
import itertools
import os
import secrets
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba import types
from numba.core.base import BaseContext
from numba.core.bytecode import FunctionIdentity
from numba.core.dispatcher import Dispatcher

_LASTING = (f"{__package__}.", "numba.")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), np.generic, np.dtype)
_process = secrets.token_hex(8)
_numbers = itertools.count()
_of_types: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class NotLastingError(TypeError):
    """Another process may have something else that looks the same."""


def digest_of(*values: Any) -> str:
    """32 characters that only equal values have, in every process. Errors: NotLastingError."""
    try:
        return _digest(values)
    except RecursionError:
        raise NotLastingError("it holds itself") from None


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()[:32]


def _parts(value: Any) -> Iterator[bytes]:
    """What `value` is: others have other parts."""
    yield f"{type(value).__module__}.{type(value).__qualname__}".encode()
    if isinstance(value, types.Type):
        yield _type_digest(value).encode()
    elif isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, tuple | list):
        yield from (_digest(each).encode() for each in value)
    elif isinstance(value, frozenset | set | dict):
        own = value.items() if isinstance(value, dict) else value
        yield from sorted(_digest(each).encode() for each in own)
    elif isinstance(value, Dispatcher):
        yield _digest((value.py_func, value.targetoptions)).encode()
    elif isinstance(value, FunctionType):
        yield _function_digest(value).encode()
    elif isinstance(value, CodeType):
        yield _code_digest(value).encode()
    elif isinstance(value, type | BuiltinFunctionType):
        names = value.__module__, value.__qualname__, getattr(value, "_fields", ())
        yield _digest(names).encode()
    elif isinstance(value, ModuleType):
        yield value.__name__.encode()
    else:
        raise NotLastingError(f"{type(value)} may be another in another process")


def _type_digest(kind: types.Type) -> str:
    """Of what Numba tells types apart by, which is no number that a process gives."""
    if kind not in _of_types:
        key = kind.dispatcher if isinstance(kind, types.Dispatcher) else kind.key
        if isinstance(key, str) and (" at 0x" in key or "#" in key):
            raise NotLastingError(f"{kind} has an address")
        _of_types[kind] = _digest(key)
    return _of_types[kind]


def _function_digest(function: FunctionType) -> str:
    module = sys.modules.get(function.__module__ or "")
    is_whole = module is not None and vars(module) is function.__globals__
    if not is_whole or not function.__module__.startswith(_LASTING):
        raise NotLastingError(f"{function.__qualname__}'s globals may be others")
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    own = function.__code__, cells, function.__defaults__, function.__kwdefaults__
    return _digest((function.__module__, function.__qualname__, *own))


def _code_digest(code: CodeType) -> str:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    place = code.co_qualname, code.co_firstlineno, code.co_linetable
    own = code.co_code, code.co_exceptiontable, code.co_consts, code.co_flags, code.co_argcount
    return _digest((own, names, place))


def name_by_content() -> None:
    """Let Numba name so what it compiles from now on."""
    mangler, from_function = BaseContext.mangler, FunctionIdentity.from_function.__func__

    def content_name(
        self: Any, name: str, types: Any, *, abi_tags: Any = (), uid: Any = None
    ) -> Any:
        """Numba's, of a function of these types."""
        try:
            own, types = (digest_of(tuple(types), tuple(abi_tags), uid),), ()
        except NotLastingError:
            own = (*abi_tags, str(uid), f"{_process}.{os.getpid()}")
        return mangler(self, name, types, abi_tags=own)

    def identity(cls: Any, pyfunc: Any) -> Any:
        """Numba's, whose number is one of content; a fork has other numbers, too."""
        found = from_function(cls, pyfunc)
        try:
            found.unique_id = digest_of(found.func, found.filename)  # which errors say
        except NotLastingError:
            found.unique_id = f"{_process}.{os.getpid()}.{next(_numbers)}"
        found.unique_name = f"{found.func_qualname}${found.unique_id}"
        return found

    BaseContext.mangler, FunctionIdentity.from_function = content_name, classmethod(identity)
