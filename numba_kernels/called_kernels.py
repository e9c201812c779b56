"""Kernels that other kernels call are compiled as far as their callers need them.

Numba makes a whole program of every function: optimized machine code, with an entry for Python and
one for C. A caller uses none of these: it links the function's LLVM code, optimizes it together
with its own, and compiles it again. So of a function that a kernel calls nothing but its LLVM code
is made, and kept on disk with that of its callees: what has an entry for Python links all, once.
For Python the same function is compiled to the end, as another kernel.

To Numba a number that is written in a call is a type of its own, and what is called is compiled
once more for each. Here it is an int64, as any other.

A kernel is always made of such code, so its bits do not depend on what was compiled before it.
Kernels compute on arrays that Python keeps, so they count no references to them, which would be a
sixth of the work. What makes arrays has `_nrt=True`; it may not return any to what has not.

This leans on parts of Numba that are its own (`numba_kernels.numba_parts`).
"""

import importlib
import weakref
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher, _FunctionCompiler
from numba.core.imputils import lower_constant
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.core.typed_passes import NopythonTypeInference
from numba.extending import overload
from numba.np import arrayobj

from hotcold.numba_kernels.by_address import num_arrays
from hotcold.numba_kernels.kernel_cache import (
    being_compiled,
    is_called,
    read_no_more,
    reads_cache,
)

_PACKAGE = f"{__package__}."
# How code is kept, beside Numba's own "object" and "bitcode".
_CALLED, _WHOLE = "called functions", "whole program"
_ENTRY = "_ZN7cpython"  # so the names of entries for Python begin
_OWN_ENTRY = f"{_ENTRY}7hotcold"  # which no kernel of others links
_DESTRUCTOR = ".dtor."  # of a list's items, which each module that makes one defines for itself
_SHARED = llvm.Linkage.external, llvm.Linkage.linkonce_odr  # by modules that are linked
_with_variants: weakref.WeakSet[Any] = weakref.WeakSet()
_waiting: dict[str, Any] = {}  # environments (what raising needs) of functions without machine code


class KernelLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A function's code. Without an entry it becomes machine code when its address is wanted.

    LLVM code is kept as bitcode, in memory and on disk: each function that is called has its own
    and that of all that it reaches. Only what has an entry links them, once.
    """

    _code: dict[str, bytes] | None = None  # by function, its own first; none of an entry
    _was_asked_for = False  # its address, so there is machine code, too
    _bitcode = b""  # of what has an entry and is not ours, until somebody links it

    def finalize(self) -> None:
        """See numba.core.codegen."""
        self._raise_if_finalized()
        for function in _defined(self._final_module):
            if function.name.startswith(_DESTRUCTOR):
                function.linkage = "internal"
        code = _code_by_name(self._final_module)
        own = set(code.values())
        for each in self._linking_libraries:
            _add_code(code, _code_of(each))
            self._reload_init.update(each._reload_init)
        if any(map(_is_entry, self._final_module.functions)):
            self._link(dict.fromkeys(each for each in code.values() if each not in own))
            self._linking_libraries.clear()
            super().finalize()
            return
        self._finalize_dynamic_globals()
        for each in self._linking_libraries:
            self._dynamic_globals += each._dynamic_globals
        self._linking_libraries.clear()
        self._code, self._finalized = code, True

    def _link(self, callees: Iterable[bytes]) -> None:
        """Add this code to the module: defined more than once, to be inlined, unused to be removed.

        Numba has it "linkonce_odr", of which LLVM links only what is wanted so far.
        """
        for each in callees:
            module = llvm.parse_bitcode(each)
            for function in _defined(module):
                if function.linkage in _SHARED:
                    function.linkage = "weak_odr"
            self._final_module.link_in(module)
        for function in _defined(self._final_module):
            if function.linkage == llvm.Linkage.weak_odr:
                function.linkage = "linkonce_odr"

    def _optimize_functions(self, ll_module: Any) -> None:
        """Make less of it: a kernel that links it optimizes it once more, with all else."""
        ll_module.data_layout = self._codegen._data_layout
        for function in _defined(ll_module):
            passes, builder = self._codegen._function_pass_manager(opt=1)
            passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        """Numba runs a cheap round before, for references that are counted.

        What is left of others' functions is this library's alone: in a process one name is one
        place in memory, whoever came first.
        """
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)
        for function in _defined(self._final_module):
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = "internal"

    def _finalize_final_module(self) -> None:
        super()._finalize_final_module()
        _set_waiting(self._codegen)

    def link_called(self) -> None:
        """Make a whole module of a called function and all that it reaches, optimized."""
        own, *callees = dict.fromkeys((self._code or {}).values())
        self._final_module = llvm.parse_bitcode(own)
        self._was_asked_for = True
        self._link(callees)
        self._optimize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        """See numba.core.codegen."""
        self._ensure_finalized()
        if self._code and not self._was_asked_for and not name.startswith(_ENTRY):
            own = next(iter(self._code.values()))
            if self._code.get(name) == own:
                self.link_called()
                self._finalize_final_module()
        return int(super().get_pointer_to_function(name))

    def serialize_using_object_code(self) -> tuple[Any, ...]:
        """See numba.core.codegen."""
        self._ensure_finalized()
        if self._code:
            return self.name, _CALLED, self._code
        known = [*self._final_module.functions, *self._final_module.global_variables]
        defined = [each.name for each in known if not each.is_declaration]
        bitcode = b""
        if not any(each.startswith(_OWN_ENTRY) for each in defined):
            bitcode = self._get_module_for_linking().as_bitcode()
        return self.name, _WHOLE, (self._get_compiled_object(), bitcode, defined)

    def _get_module_for_linking(self) -> Any:
        if self._bitcode:
            self._shared_module, self._bitcode = llvm.parse_bitcode(self._bitcode), b""
        return super()._get_module_for_linking()

    @classmethod
    def _unserialize(cls, codegen: Any, state: tuple[Any, ...]) -> Any:
        name, kind, data = state
        if kind not in (_CALLED, _WHOLE):
            return super()._unserialize(codegen, state)
        self = codegen.create_library(name)
        if kind == _CALLED:
            self._code = {name: _known.setdefault(code, code) for name, code in data.items()}
            self._finalized = self._disable_inspection = True
            return self
        machine_code, self._bitcode, defined = data
        self.enable_object_caching()
        self._set_compiled_object(machine_code)
        codegen._engine._defined_symbols.update(defined)
        self._finalize_final_module()
        return self


_known: dict[bytes, bytes] = {}  # bitcode that was read


class TwoBodiesError(BaseException):
    """Two functions have one name. No Exception: Numba would make errors of the source of those."""


def _add_code(known: dict[str, bytes], more: dict[str, bytes]) -> None:
    """Errors: TwoBodiesError."""
    for name, code in more.items():
        if known.setdefault(name, code) != code:
            raise TwoBodiesError(name)


def _code_of(library: Any) -> dict[str, bytes]:
    """The code of each function that it defines or reaches."""
    code: dict[str, bytes] | None = getattr(library, "_code", None)
    return code or _code_by_name(library._get_module_for_linking())


def _code_by_name(module: Any) -> dict[str, bytes]:
    code = module.as_bitcode()
    return {each.name: code for each in _defined(module) if each.linkage in _SHARED}


def _defined(module: Any) -> list[Any]:
    return [each for each in module.functions if not each.is_declaration]


def _is_entry(function: Any) -> bool:
    """Whether it is an entry for Python."""
    return bool(function.name.startswith(_ENTRY) and not function.is_declaration)


def _set_waiting(codegen: Any) -> None:
    for name in [name for name in _waiting if codegen._engine.is_symbol_defined(name)]:
        type(codegen).set_env(codegen, name, _waiting.pop(name))


def _counts(dispatcher: Any) -> bool:
    """Whether its code counts references to arrays: what makes some does, and says `_nrt`."""
    is_ours = dispatcher.py_func.__module__.startswith(_PACKAGE)
    return bool(dispatcher.targetoptions.get("_nrt", not is_ours))


def _check_result(caller: Any, callee: Any) -> None:
    """Raise TypeError where one alone counts references, and arrays are returned."""
    for each in callee.overloads.values():
        if num_arrays(each.signature.return_type):
            names = " and ".join(each.py_func.__qualname__ for each in (caller, callee))
            raise TypeError(f"of {names} one alone has _nrt=True, and an array is returned")


def _wrong_shape(source, target):  # type: ignore[no-untyped-def]
    """Where arrays are assigned to arrays of another shape; for compiled code."""
    raise NotImplementedError("_wrong_shape() is for compiled code")


@overload(_wrong_shape)
def _say_wrong_shape(source, target):  # type: ignore[no-untyped-def]
    """Numba's message has both shapes, and twenty functions to write them."""

    def fail(source, target):  # type: ignore[no-untyped-def]
        raise ValueError("an array is assigned to one of another shape")

    return fail


def _no_address(context: Any, builder: Any, kind: types.Type, kernel: Any) -> Any:
    """A kernel that is given to another: its type says which, its address is this process's own."""
    return context.get_constant_null(kind)


def compile_called_kernels() -> None:
    """Let Numba compile so from now on."""
    importlib.import_module("numba.experimental.function_type")  # Numba's own, before `_no_address`
    lower_constant(types.Dispatcher)(_no_address)
    # Loops of unknown length: a fifth of all code, though products are written as vectors.
    llvm.set_option("hotcold", "-unroll-runtime=0")
    codegen = cpu_target.target_context.codegen()
    compile_function, add_overload = Dispatcher.compile, Dispatcher.add_overload
    customize_flags = _FunctionCompiler._customize_flags
    get_call_template = Dispatcher.get_call_template
    infer = NopythonTypeInference.run_pass

    def compile_or_refuse(self: Any, sig: Any) -> None:
        """What others have compiled is used as far as each name stands for one function."""
        try:
            compile_function(self, sig)
        except TwoBodiesError as problem:
            if is_called():
                raise
            if not reads_cache():
                raise RuntimeError(f"two functions are named {problem}") from None
            read_no_more()
            for each in _with_variants:
                each.variants = {key: made for key, made in each.variants.items() if not key[1]}
            compile_or_refuse(self, sig)

    def compile_variant(self: Any, sig: Any) -> Any:
        """Compile for Python or for a caller; each has what was compiled for it."""
        args = tuple(normalize_signature(sig)[0])
        with global_compiler_lock:
            being_compiled.append(self)
            try:
                if not hasattr(self, "variants"):
                    self.variants = {}
                    _with_variants.add(self)
                key = args, is_called()
                if key not in self.variants:
                    self.overloads.pop(args, None)
                    compile_or_refuse(self, sig)
                    self.variants[key] = self.overloads[args]
            finally:
                being_compiled.pop()
            found = self.overloads[args] = self.variants[key]  # callers ask for what they call
            return found.entry_point

    def call_template(self: Any, args: Any, kws: Any) -> Any:
        """Numba's, by which calls of kernels by kernels find their types."""
        if self.py_func.__module__.startswith(_PACKAGE):
            args = tuple(map(types.unliteral, args))
            kws = {name: types.unliteral(given) for name, given in kws.items()}
        found = get_call_template(self, args, kws)
        if being_compiled and _counts(being_compiled[-1]) != _counts(self):
            _check_result(being_compiled[-1], self)
        return found

    def without_entries(self: Any, flags: Any) -> Any:
        flags = customize_flags(self, flags)
        if self.py_func.__module__.startswith(_PACKAGE):
            flags.nrt = _counts(self)
        flags.no_cfunc_wrapper = True  # nobody calls them through an address
        flags.no_cpython_wrapper = flags.no_cpython_wrapper or is_called()
        return flags

    def infer_types(self: Any, state: Any) -> Any:
        """Numba's, which without counted references lets nobody return a part of an argument."""
        was_enabled = state.targetctx.enable_nrt
        state.targetctx.enable_nrt = True
        try:
            return infer(self, state)
        finally:
            state.targetctx.enable_nrt = was_enabled

    def keep(self: Any, cres: Any) -> None:
        if is_called():
            self.overloads[tuple(cres.signature.args)] = cres
        else:
            if not _counts(self) and num_arrays(cres.signature.return_type):
                raise TypeError(f"{self.py_func.__qualname__} returns an array: say _nrt=True")
            add_overload(self, cres)

    def set_env(name: str, environment: Any) -> None:
        _waiting[name] = environment
        _set_waiting(codegen)

    Dispatcher.compile, Dispatcher.add_overload = compile_variant, keep
    Dispatcher.get_call_template = call_template
    _FunctionCompiler._customize_flags = without_entries
    NopythonTypeInference.run_pass = infer_types
    arrayobj.raise_with_shape_context = _wrong_shape
    codegen._library_class, codegen.set_env = KernelLibrary, set_env
