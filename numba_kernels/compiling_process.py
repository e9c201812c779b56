"""What spares a process that only compiles, and then ends, a tenth of its time.

Numba serves programs that run on, and that watch how it compiles. Compiled code stays the same.
This leans on parts of Numba that are its own (`numba_kernels.numba_parts`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from numba.core import errors, event, inline_closurecall, ir
from numba.core.targetconfig import TargetConfig

from hotcold.numba_kernels.numba_parts import has_compiling_parts
from hotcold.numba_kernels.one_compiler import never_collect

_PLAIN = frozenset({ir.Loc, ir.Scope, str, int, float, bool, type(None)})  # have no variables


def only_compile() -> None:
    """Let this process compile faster from now on; it never collects garbage."""
    never_collect()
    if has_compiling_parts():
        TargetConfig.__eq__, TargetConfig.__hash__ = _same_values, _hash_of_type
        event.start_event = event.end_event = _tell_nobody
        event.install_timer = lambda kind, callback: nullcontext()
        ir.Inst._rec_list_vars = _variables
        inline_pass = inline_closurecall.InlineClosureCallPass
        inline_pass.run = _where_needed(inline_pass.run)
        if hasattr(errors, "HighlightColorScheme"):
            errors.HighlightColorScheme._markup = _without_colors


# Each call of each overload looks flags up, and Numba would list the options of both every time.


def _same_values(self: Any, other: Any) -> bool:
    if type(self) is not type(other):
        return False
    names = self._values.keys() | other._values.keys()  # others are what both leave at its default
    return all(getattr(self, name) == getattr(other, name) for name in names)


def _hash_of_type(self: TargetConfig) -> int:
    return hash(type(self))


def _tell_nobody(kind: str, data: Any = None, exc_details: Any = None) -> None:
    """In place of Numba's events, which timers of each function that is compiled hear."""


def _without_colors(self: Any, msg: str, color: Any = None, style: Any = None) -> str:
    """For a message of each overload that does not fit, of which hardly any is shown."""
    return msg


def _where_needed(inline: Callable[[Any], None]) -> Callable[[Any], None]:
    """Numba's way to inline closures, which goes over a function four times, for those with any.

    A `reduce` or stencil by another name is not seen; no kernel has one.
    """

    def run(self: Any) -> None:
        expressions = (
            each.value
            for block in self.func_ir.blocks.values()
            for each in block.body
            if isinstance(each, ir.Assign) and isinstance(each.value, ir.Expr)
        )
        is_reduced = "reduce" in self.func_ir.func_id.code.co_names
        if is_reduced or any(each.op in ("make_function", "build_list") for each in expressions):
            inline(self)

    return run


def _variables(self: ir.Inst, value: Any) -> list[ir.Var]:
    """Numba's, which looks for variables in all that an instruction has, and copies more lists."""
    found: list[ir.Var] = []
    _add_variables(value, found)
    return found


def _add_variables(value: Any, found: list[ir.Var]) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, ir.Var):
        found.append(value)
    elif isinstance(value, ir.Inst):
        found.extend(value.list_vars())
    elif isinstance(value, list | tuple):
        for each in value:
            _add_variables(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _add_variables(each, found)
