"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hotcold.actors.protocol.options import OPTIONS, SystemOptions, bytes_of, seconds_of
from hotcold.jobs.support.settings import flag_of
from hotcold.jobs.support.settings import shared_option as _option
from hotcold.model.errors import UsageError, shown
from hotcold.model.parameters import Biases, Kind, Number, Parameter, Switch, Texts, Whole, bias_of
from hotcold.model.sampling import PARAMETERS, REPEATS, SamplingParams


class Reads(click.ParamType[Any]):
    """What `read` makes of a text, or refuses with a UsageError; help calls it `name`."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """See click; a default need not be a text."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except UsageError as problem:
            self.fail(str(problem), param, ctx)


def _token_ids(text: str) -> list[int]:
    """Ids with commas between them; they are checked against the vocabulary later."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(f"{shown(text)} is no list of token ids; write it like 1,2,3") from None


def _addresses(text: str) -> tuple[str, ...]:
    """With commas between them; a start checks whether they are nodes of the cluster."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


BYTES = Reads("size", bytes_of)
DURATION = Reads("time", seconds_of)
TOKEN_IDS = Reads("ids", _token_ids)
ADDRESSES = Reads("addresses", _addresses)


def system_option(name: str, **changes: Any) -> Any:
    """The option of a field of `SystemOptions`; a command may change its help and type."""
    one = OPTIONS[name]
    kinds: dict[str, Any] = {
        "choice": click.Choice(one.choices),
        "number": int,
        "size": Reads("size", lambda text: 0 if text in one.choices else bytes_of(text)),
        "path": click.Path(path_type=Path),
        "addresses": ADDRESSES,
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
        Biases: {"type": Reads("id=number", bias_of), "multiple": True},
    }
    kind = kinds[type(parameter.kind)]
    has_default = not isinstance(parameter.kind, Switch) and parameter.default != ()
    unset = parameter.default if has_default else None
    return _option(flag_of(name), name, help=parameter.about, unset=unset, **kind)


_KEPT = [
    _option("--keep", "keep_s", type=DURATION, default=0,
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


def given_option(*names: str) -> str:
    """The first option of these parameters that the running command was given; "" for none."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in names and source is not ParameterSource.DEFAULT:
            return param.opts[0]
    return ""


def split_sampling(path: Path, values: dict[str, Any]) -> SamplingParams:
    """`given_sampling` as changes of the model's defaults."""
    return SamplingParams.of_given(given_sampling(values), SamplingParams.defaults(path))
