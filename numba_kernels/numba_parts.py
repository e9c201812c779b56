"""Numba's own parts that this package leans on, and whether this Numba has them as they were tried.

Numba may change them in any version, also in ways that no name tells: a version that lacks one, or
whose functions take other arguments, compiles as it does by itself. Kernels then compute the same
and take longer to compile.
"""

import atexit
import importlib
import inspect
import os
import shutil
import tempfile
from typing import Any

import numba

from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.numba_kernels.own_cache import own_folder

_NEWEST = (0, 68)  # what compiling leans on was not tried with a later one
_CORE = "numba.core."

# Each with the names of its arguments, None where it is no function.
_NAMING = {
    "base:BaseContext.mangler": "self name types abi_tags uid",
    "bytecode:FunctionIdentity.from_function": "pyfunc",
}
_CACHE = {
    "compiler_lock:global_compiler_lock": None,
    "caching:NullCache": None,
    "codegen:JITCPUCodegen.magic_tuple": "self",
    "codegen:JITCodeLibrary.has_dynamic_globals": None,
    "compiler:CompileResult._reduce": "self",
    "compiler:CompileResult._rebuild": "target_context libdata fndesc env signature objectmode"
    " lifted typeann reload_init referenced_envs",
    "serialize:dumps": "obj",
    "sigutils:normalize_signature": "sig",
    "dispatcher:FunctionCache": None,
    "dispatcher:Dispatcher.compile": "self sig",
}
_COMPILING = {
    "dispatcher:Dispatcher.add_overload": "self cres",
    "dispatcher:Dispatcher.get_call_template": "self args kws",
    "dispatcher:_FunctionCompiler._customize_flags": "self flags",
    "codegen:JITCodeLibrary.finalize": "self",
    "codegen:JITCodeLibrary._optimize_functions": "self ll_module",
    "codegen:JITCodeLibrary._optimize_final_module": "self",
    "codegen:JITCodeLibrary._finalize_final_module": "self",
    "codegen:JITCodeLibrary._finalize_dynamic_globals": "self",
    "codegen:JITCodeLibrary._raise_if_finalized": "self",
    "codegen:JITCodeLibrary._get_module_for_linking": "self",
    "codegen:JITCodeLibrary._ensure_finalized": "self",
    "codegen:JITCodeLibrary.enable_object_caching": "self",
    "codegen:JITCodeLibrary._set_compiled_object": "self value",
    "codegen:JITCodeLibrary._get_compiled_object": "self",
    "codegen:JITCodeLibrary.get_pointer_to_function": "self name",
    "codegen:JITCodeLibrary.serialize_using_object_code": "self",
    "codegen:JITCodeLibrary._unserialize": "codegen state",
    "codegen:JitEngine.is_symbol_defined": "self name",
    "codegen:JITCPUCodegen._library_class": None,
    "codegen:JITCPUCodegen._function_pass_manager": "self kwargs",
    "codegen:JITCPUCodegen._module_pass_manager": "self kwargs",
    "codegen:JITCPUCodegen.set_env": "self env_name env",
    "typed_passes:NopythonTypeInference.run_pass": "self state",
    "base:BaseContext.make_tuple": "self builder typ values",
    "types:BaseTuple.from_types": "tys pyclass",
    "datamodel:StructModel.__init__": "self dmm fe_type members",
    "datamodel:register_default": None,
    "imputils:lower_getattr_generic": None,
    "pythonapi:NativeValue.__init__": "self value is_error cleanup",
    "pythonapi:unbox": None,
    "registry:cpu_target": None,
    "types:unliteral": "lit_type",
}


def has_naming_parts() -> bool:
    """Whether `numba_kernels.content_names` works with this Numba."""
    return all(_is_as_tried(*part) for part in _NAMING.items())


def has_cache_parts() -> bool:
    """Whether `numba_kernels.one_compiler` works with this Numba."""
    return has_naming_parts() and all(_is_as_tried(*part) for part in _CACHE.items())


def has_compiling_parts() -> bool:
    """Whether `numba_kernels.called_kernels` works with this Numba."""
    is_known = numba.version_info.short <= _NEWEST
    return is_known and has_cache_parts() and all(_is_as_tried(*p) for p in _COMPILING.items())


def _is_as_tried(name: str, arguments: str | None) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(_CORE + module)
        for part in path.split("."):
            found = getattr(found, part)
        return arguments is None or list(inspect.signature(found).parameters) == arguments.split()
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def use_numbas_cache() -> None:
    """Keep kernels in one folder of all sources, by Numba's own cache alone.

    Where that folder is not to be trusted, or names in code are not those of other processes, they
    are kept until this process ends.
    """
    try:
        if not has_naming_parts():
            raise PermissionError
        folder = str(own_folder("numba", sources_digest()))
    except OSError:
        folder = tempfile.mkdtemp(prefix="hotcold-kernels-")
        atexit.register(_remove, folder, os.getpid())
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
