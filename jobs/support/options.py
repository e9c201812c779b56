"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hotcold.actors.protocol.messages import AUTO_MODE, EXCHANGES, MODES
from hotcold.actors.protocol.options import (
    DEVICES,
    DTYPES,
    KV_DTYPES,
    PIN_CHOICES,
    SystemOptions,
    bytes_of,
    seconds_of,
)
from hotcold.jobs.support.settings import flag_of
from hotcold.jobs.support.settings import shared_option as _option
from hotcold.model.errors import UsageError, shown
from hotcold.model.parameters import Biases, Kind, Number, Parameter, Switch, Texts, Whole, bias_of
from hotcold.model.sampling import PARAMETERS, SamplingParams

dtype_option = _option(
    "--dtype",
    "weight_dtype",
    type=click.Choice(DTYPES),
    help="Cast the weights to 16 bits while they load, or quantize them to 8 or 4 (q4_1: with a "
    "minimum beside each scale); as stored without it.",
)


class Bytes(click.ParamType[int]):
    """A size such as 8GiB (binary), 8GB (decimal) or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
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


_SYSTEM = [
    _option("--mode", type=click.Choice((*MODES, AUTO_MODE)), help="Which neurons to compute: "
                 "all; up and down only where the gate fired (the same tokens); only where they "
                 "add more than a threshold; what a predictor chooses; auto: the faster of the "
                 "model's default and of predictors made for a recall of 0.99 or more, where such "
                 "lie beside it."),
    _option("--predictors", type=click.Path(path_type=Path), help="The file of predictors for "
                 "--mode sign and lowrank; the model's own without it."),
    _option("--thresholds", type=click.Path(path_type=Path), help="The file of thresholds for "
                 "--mode threshold; the model's own without it."),
    dtype_option,
    _option("--plan", type=click.Path(path_type=Path), help="Load by this plan; without it by "
                 "the one that `hotcold plan` made for these options, if there is one."),
    _option("--threads", "num_threads", type=int, help="Threads; one a core without it."),
    _option("--cpu-actors", "num_cpu_actors", type=int, help="CPU services that share the "
                 "cold neurons; as many as NUMA nodes without it."),
    _option("--context", "context_length", type=int, help="Most tokens of a request, the "
                 "prompt and the answer together."),
    _option("--parallel", "max_batch", type=int, help="Requests that run at once, 1 to 32; 8 "
                 "without it."),
    _option("--kv-tokens", "kv_positions", type=int, help="Tokens that the KV cache holds, of "
                 "all requests together; one context without it."),
    _option("--kv-dtype", type=click.Choice(KV_DTYPES), help="KV cache format."),
    _option("--device", type=click.Choice(DEVICES), default="auto", show_default=True,
                 help="Where attention, head and hot neurons are; auto: a GPU if there is one."),
    _option("--gpu-memory", "gpu_memory_bytes", type=Bytes(), help="VRAM to use, like 8GiB; "
                 "all that is free, but for a reserve, without it; 0: no GPU."),
    _option("--cpu-memory", "cpu_memory_bytes", type=Bytes(), help="Memory to use, with "
                 "--hosts on each of them."),
    _option("--exchange", type=click.Choice(EXCHANGES), default="arena", show_default=True,
                 help="How the driver asks services: doorbells in shared memory, or actor calls."),
    _option("--pin", type=click.Choice(PIN_CHOICES), default="auto", show_default=True,
                 help="Keep services on the cores and memory of their NUMA nodes; auto: with one "
                 "node, on cores until another program wants those."),
    _option("--hosts", type=Addresses(), default="", help="Ray nodes that share the CPU "
                 "services, like 10.0.0.1,10.0.0.2; the driver's own without it."),
]  # fmt: skip


def _sampling_option(name: str, parameter: Parameter) -> Any:
    """The option of a sampling parameter."""
    kinds: dict[type[Kind], dict[str, Any]] = {
        Whole: {"type": int},
        Number: {"type": float},
        Switch: {"is_flag": True},
        Texts: {"multiple": True},
        Biases: {"type": Bias(), "multiple": True},
    }
    return _option(flag_of(name), name, help=parameter.about, **kinds[type(parameter.kind)])


_KEPT = [
    _option("--keep", "keep_s", type=Duration(), default=0.0,
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
system_options = options_adder(_SYSTEM)  # those of `SystemOptions`
sampling_options = options_adder(  # those of `SamplingParams`
    [_sampling_option(name, one) for name, one in PARAMETERS.items() if one.about]
)


def split_system_options(values: dict[str, Any]) -> SystemOptions:
    """Take `SystemOptions` out of a command's keyword arguments."""
    names = SystemOptions.__dataclass_fields__
    return SystemOptions(**{name: values.pop(name) for name in names if name in values})


def split_sampling(path: Path, values: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of a command's keyword arguments; the model's defaults else."""
    given = {name: values.pop(name) for name in PARAMETERS if name in values}
    told = {name: value for name, value in given.items() if value != ()}
    return SamplingParams.of_given(told, SamplingParams.defaults(path))
