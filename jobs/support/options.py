"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hotcold.actors.protocol.options import OPTIONS, SystemOptions, bytes_of, seconds_of
from hotcold.jobs.support.settings import flag_of
from hotcold.jobs.support.settings import shared_option as _option
from hotcold.model.errors import UsageError, shown
from hotcold.model.parameters import Biases, Kind, Number, Parameter, Switch, Texts, Whole, bias_of
from hotcold.model.sampling import PARAMETERS, REPEATS, SamplingParams


class Bytes(click.ParamType[int]):
    """A size such as 8GiB (binary), 8GB (decimal) or a number of bytes; a word for none."""

    name = "size"

    def __init__(self, none: tuple[str, ...] = ()) -> None:
        self._none = none

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        if value in self._none:
            return 0
        try:
            return bytes_of(value)
        except UsageError as problem:
            self.fail(str(problem), param, ctx)


class Duration(click.ParamType[float]):
    """A time such as 10m, 1h30m or a number of seconds; less than 0: without end."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Seconds, -1 for a time without end."""
        if isinstance(value, int | float):
            return float(value)
        try:
            return seconds_of(value)
        except UsageError as problem:
            self.fail(str(problem), param, ctx)


class TokenIds(click.ParamType[list[int]]):
    """Token ids with commas between them."""

    name = "ids"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """The list of ids; they are checked against the vocabulary later."""
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")] if value.strip() else []
        except ValueError:
            self.fail(f"{shown(value)} is no list of token ids; write it like 1,2,3", param, ctx)


class Bias(click.ParamType[tuple[int, float]]):
    """A token id and a number, such as 1234=-5."""

    name = "id=number"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, float]:
        """The pair; `SamplingParams` checks its bounds."""
        if isinstance(value, tuple):
            return value
        try:
            return bias_of(value)
        except UsageError as problem:
            self.fail(str(problem), param, ctx)


class Addresses(click.ParamType[tuple[str, ...]]):
    """Addresses of hosts with commas between them."""

    name = "addresses"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """The addresses; a start checks whether they are nodes of the cluster."""
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())


def system_option(name: str, **changes: Any) -> Any:
    """The option of a field of `SystemOptions`; a command may change its help and type."""
    one = OPTIONS[name]
    kinds: dict[str, Any] = {
        "choice": click.Choice(one.choices),
        "number": int,
        "size": Bytes(one.choices),
        "path": click.Path(path_type=Path),
        "addresses": Addresses(),
    }
    given = {"type": kinds[one.reads], "help": one.about}
    if one.default is not None:
        given |= {"default": one.default or "", "show_default": isinstance(one.default, str)}
    return _option(one.flag, name, **given | changes)


def _sampling_option(name: str, parameter: Parameter) -> Any:
    """The option of a sampling parameter."""
    kinds: dict[type[Kind], dict[str, Any]] = {
        Whole: {"type": int},
        Number: {"type": float},
        Switch: {"is_flag": True},
        Texts: {"multiple": True},
        Biases: {"type": Bias(), "multiple": True},
    }
    kind = kinds[type(parameter.kind)]
    has_default = not isinstance(parameter.kind, Switch) and parameter.default != ()
    unset = parameter.default if has_default else None
    return _option(flag_of(name), name, help=parameter.about, unset=unset, **kind)


_KEPT = [
    _option("--keep", "keep_s", type=Duration(), default=0,
                 help="Keep the system for the next command, so long after its last answer: 10m, "
                 "300 (seconds), -1 (until `hotcold stop`); 0: it ends with this command."),
    _option("--own", "is_own", is_flag=True, help="Start a system of this command's own, also "
                 "where one of the same model and options is running."),
]  # fmt: skip


def options_adder(options: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds these options to a command."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


own_option = options_adder(_KEPT[1:])  # --own
kept_options = options_adder(_KEPT)  # --keep and --own
system_options = options_adder([system_option(name) for name in OPTIONS])
sampling_options = options_adder(
    [_sampling_option(name, one) for name, one in PARAMETERS.items() if one.about]
)


def split_system_options(values: dict[str, Any]) -> SystemOptions:
    """Take `SystemOptions` out of a command's keyword arguments."""
    return SystemOptions(**{name: values.pop(name) for name in OPTIONS if name in values})


def given_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options out of a running command's keyword arguments; those given.

    Of the repeat penalty's two names the line's wins over one of settings.
    """
    taken = {name: values.pop(name) for name in PARAMETERS if name in values}
    given = {name: value for name, value in taken.items() if value not in (None, ())}
    source = click.get_current_context().get_parameter_source
    sources = {name: source(name) or 0 for name in REPEATS & given.keys()}
    first = min(sources.values(), default=0)  # the line's is less than that of settings
    return {name: value for name, value in given.items() if sources.get(name, first) == first}


def split_sampling(path: Path, values: dict[str, Any]) -> SamplingParams:
    """`given_sampling` as changes of the model's defaults."""
    return SamplingParams.of_given(given_sampling(values), SamplingParams.defaults(path))
