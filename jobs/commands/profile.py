"""`hotcold profile`: read a text to learn how often each neuron fires, and on which inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.messages import NO_MODEL
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.profile.files import ProfileFiles
from hotcold.jobs.support.console import json_option
from hotcold.jobs.support.options import given_option, options_adder, system_option
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import locate_model

if TYPE_CHECKING:
    from hotcold.jobs.profile.state import ProfileState, ProfileTask
    from hotcold.jobs.support.text_file import TextIds
    from hotcold.model.config.model_config import ModelConfig
    from hotcold.placement.profile import ActivationProfile

_DEFAULT_KLD = 0.03  # nats a token; quantizing the same small models to q4 costs 0.2 to 0.5
_WINDOW = 512
_NUM_INPUTS = 4096
_MAX_INPUT_BYTES = 2 << 30  # unless --inputs says how many

_FILE = click.Path(path_type=Path)
_OPTIONS = [
    click.option("--text", "text_path", type=_FILE,
                 help='UTF-8 text, or JSON lines of {"text": ...} or {"messages": ...}; the '
                 "language reference that comes with Python without it."),
    click.option("--target-kl", "target_kld", type=click.FloatRange(min=0, min_open=True),
                 help="What thresholds may cost: the mean KL divergence from the dense model in "
                 f"nats, {_DEFAULT_KLD:g} without it."),
    click.option("--thresholds-out", type=_FILE, help="The thresholds; in the model's directory "
                 "without it."),
    click.option("--out", type=_FILE, help="The profile; in the model's directory without it."),
    click.option("--inputs-out", type=_FILE, help="The recorded inputs; there too without it."),
    click.option("--inputs", "num_inputs", type=click.IntRange(min=0), help="Record the FFN inputs "
                 f"of so many tokens, to train predictors; {_NUM_INPUTS} without it, or what fits "
                 "in 2 GiB; 0: none."),
    click.option("--window", type=int, help="Positions of a window, its bos included; "
                 f"{_WINDOW}, or what the model allows, without it."),
    click.option("--plot", type=_FILE, help="Draw the profile into this .png, .pdf or .svg."),
    click.option("--max-tokens", type=click.IntRange(min=1), help="Read only the first so many."),
    click.option("--restart", is_flag=True, help="Do not go on from where a run was stopped."),
    click.option("--save-every", "every_s", type=click.FloatRange(min=0), default=10.0,
                 help="Seconds of work that a stopped run may lose."),
    system_option("num_threads"),
    system_option("num_cpu_actors", help="CPU services that share the neurons; as many as NUMA "
                  "nodes without it."),
    system_option("exchange"),
]  # fmt: skip


@dataclass(frozen=True)
class _Reading:
    """What of the text is read, and how."""

    text_path: Path | None
    num_inputs: int | None
    window: int | None
    max_tokens: int | None


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@options_adder(_OPTIONS)
@json_option
def profile(
    model: str | None,
    out: Path | None,
    inputs_out: Path | None,
    plot: Path | None,
    restart: bool,
    every_s: float,
    target_kld: float | None,
    thresholds_out: Path | None,
    **values: Any,
) -> dict[str, Any]:
    """Count how often each neuron of MODEL fires on a text (the embedded model without MODEL).

    Plans and predictors are made from what this writes. A run that was stopped goes on where it
    was when the same command is given again.

    Where a gated model's activation is never exactly zero (SwiGLU, GeGLU), thresholds are
    calibrated first, for --mode threshold; neurons that pass them are counted.

    Of a mixture of experts it also counts how often each is chosen, and how soon again while the
    model answers places of the text itself. Its thresholds are calibrated only with --target-kl.
    """
    from hotcold.actors.setup.modes import has_thresholds, require_predictable, unpredictable
    from hotcold.actors.setup.preflight import read_model
    from hotcold.jobs.profile.calibrate import calibrate
    from hotcold.model.files.artifact_places import place_to_write
    from hotcold.predictors.magnitude_thresholds import thresholds_path

    reading = _Reading(**{name: values.pop(name) for name in _Reading.__dataclass_fields__})
    path = locate_model(model)
    config = read_model(path)
    # Of a mixture, whose weights may not fit in memory, only where that is asked for.
    is_asked = target_kld is not None or thresholds_out is not None
    if has_thresholds(config) and (config.experts is None or is_asked):
        if given := given_option("num_inputs", "inputs_out", "restart", "every_s", "window"):
            raise UsageError(
                f"{given} is for models some of whose activations are zero; of this one "
                f"({config.activation_fn}) none is, so thresholds are calibrated instead: leave it "
                "out"
            )
        own = thresholds_out or place_to_write(path, thresholds_path(path))
        files = ProfileFiles.choose(path, out, None, plot, with_inputs=False, thresholds=own)
        options = SystemOptions(mode="dense", **values)
        kld = target_kld or _DEFAULT_KLD
        return calibrate(path, options, files, reading.text_path, reading.max_tokens, kld)
    if is_asked:
        raise UsageError(
            "--target-kl and --thresholds-out are for gated models whose activation is never "
            f"exactly zero, and this one's is {config.activation_fn}; leave them out"
        )
    if unpredictable(config):
        if reading.num_inputs or inputs_out is not None:
            require_predictable(config, "--inputs")
        reading = replace(reading, num_inputs=0)
    with_inputs = reading.num_inputs != 0
    files = ProfileFiles.choose(path, out, inputs_out, plot, with_inputs=with_inputs)
    return _count(path, config, files, reading, values, restart, every_s)


def _count(
    path: Path,
    config: ModelConfig,
    files: ProfileFiles,
    reading: _Reading,
    values: dict[str, Any],
    restart: bool,
    every_s: float,
) -> dict[str, Any]:
    """Read the text, and write and tell what was counted; `values`: options of the system."""
    window = _window(config, reading.window)  # before Ray is imported
    from hotcold.actors.driver.prompts import Prompts
    from hotcold.actors.setup.modes import no_zeros
    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.profile.run import run_profile
    from hotcold.jobs.profile.state import ProfileState
    from hotcold.jobs.support.text_file import read_text
    from hotcold.model.files.artifact import ModelIdentity

    if not config.is_sparse and config.experts is None:
        click.echo(f"warning: {no_zeros(config)} for nearly every token", err=True)
    options = SystemOptions(mode="dense", context_length=window, draft=NO_MODEL, **values)
    system, config = prepare_system(path, options)
    prompts = Prompts(path, config, window)
    text = read_text(reading.text_path, prompts)
    num_opening = 0 if prompts.bos_id is None else 1
    task = _task(text, config, window - num_opening, reading)
    state = ProfileState(files.profile, ModelIdentity.of(path), config, task)
    if not restart:
        state.resume()
    resumed_at = state.num_done
    if resumed_at:
        click.echo(f"continued at token {resumed_at}", err=True)
    state.start()
    ids = text.ids[: task.num_tokens].tolist()
    tokens_per_s = run_profile(system, ids, prompts.bos_id, state, every_s)
    found = _write(files, state, text, config)
    return _report(found, config, task, files, tokens_per_s, resumed_at)


def _window(config: ModelConfig, window: int | None) -> int:
    most = config.max_positions
    if window is None:
        return min(_WINDOW, most)
    if not 2 <= window <= most:
        raise UsageError(f"--window is {window}; give a number from 2 to {most}")
    return window


def _task(text: TextIds, config: ModelConfig, window_ids: int, reading: _Reading) -> ProfileTask:
    from hotcold.jobs.profile.answers import NO_ANSWERS, Answers
    from hotcold.jobs.profile.state import ProfileTask

    num_tokens = min(text.ids.size, reading.max_tokens or text.ids.size)
    num_inputs = reading.num_inputs
    if num_inputs is None:
        token_bytes = config.num_layers * config.hidden_size * 2
        num_inputs = min(_NUM_INPUTS, max(1, _MAX_INPUT_BYTES // token_bytes))
    answers = NO_ANSWERS if config.experts is None else Answers.of(num_tokens, window_ids)
    return ProfileTask(text.digest, num_tokens, window_ids, min(num_inputs, num_tokens), answers)


def _write(
    files: ProfileFiles, state: ProfileState, text: TextIds, config: ModelConfig
) -> ActivationProfile:
    """Write all files; the state goes when all but the figure are there."""
    from hotcold.placement.profile import ActivationProfile, write_profile
    from hotcold.predictors.fitting.inputs import LayerInputs, write_inputs

    identity, num_tokens = state.identity, state.task.num_counted
    counts, *of_experts = state.found
    own = of_experts if config.experts is not None else ()
    found = ActivationProfile(counts, num_tokens, text.name, text.digest, *own)
    write_profile(files.profile, identity, found)
    if files.inputs is not None:
        write_inputs(files.inputs, identity, LayerInputs(state.inputs(), num_tokens, text.digest))
    state.remove()
    if files.plot is not None:
        from hotcold.jobs.profile.plot import plot_profile

        plot_profile(files.plot, found, found.layers(config), identity.name)
    return found


def _report(
    found: ActivationProfile,
    config: ModelConfig,
    task: ProfileTask,
    files: ProfileFiles,
    tokens_per_s: float,
    resumed_at: int,
) -> dict[str, Any]:
    from hotcold.jobs.profile.report import (
        expected_misses,
        print_misses,
        print_summary,
        summaries,
    )

    layers, whole = summaries(config, found)
    of_answers = f" and {task.answers.count} answers of its own" if task.answers.count else ""
    read = f"{task.num_tokens} tokens of {found.text_name}{of_answers}"
    click.echo(f"{read}, {tokens_per_s:.1f} tokens/s")
    print_summary(layers, whole)
    misses = expected_misses(found)
    if config.experts is not None:
        print_misses(misses)
    for file in files.all:
        click.echo(f"wrote {file}")
    return {
        "tokens": found.num_tokens,
        "tokens_per_s": tokens_per_s,
        "sparsity": [layer.sparsity for layer in layers],
        "hot_share": [layer.hot_share for layer in layers],
        "never_fired": [layer.num_silent for layer in layers],
        "hot_experts": [layer.hot_experts for layer in layers],
        "never_chosen": [layer.num_unchosen for layer in layers],
        "missed_experts": misses,
        "path": str(files.profile),
        "inputs_path": str(files.inputs) if files.inputs else None,
        "resumed_at": resumed_at,
    }
