"""`hotcold profile` of models whose activations are never zero: thresholds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import NO_MODEL, THRESHOLD
from hotcold.actors.setup.modes import ffn_share, no_zeros, require_memory_to_calibrate
from hotcold.actors.setup.preflight import SystemOptions, check_memory, prepare_system, read_model
from hotcold.jobs.profile.files import ProfileFiles
from hotcold.jobs.support.console import status_line
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.text_file import read_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import ActivationProfile, write_profile
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import Calibrated, write_thresholds

_TIMED_TOKENS, _TIMED_S = 64, 1.5
_WORTH = 1.02  # less than that is the machine's noise


def calibrate(
    path: Path,
    options: SystemOptions,
    files: ProfileFiles,
    text_path: Path | None,
    max_tokens: int | None,
    target_kld: float,
) -> dict[str, Any]:
    """Make thresholds, and the profile of the neurons that pass them; returns what was found.

    Errors:  HotcoldError
    """
    from hotcold.jobs.profile.calibration import (  # torch
        WINDOW,
        Calibration,
        Windows,
        calibration_bar,
    )

    length = min(WINDOW, read_model(path).max_positions)
    options = replace(options, context_length=length, draft=NO_MODEL)
    system, served = prepare_system(path, options)
    require_memory_to_calibrate(system.storage is not None)
    prompts = Prompts(path, served, length)
    text = read_text(text_path, prompts)
    windows = Windows.of(text, prompts, served, max_tokens)
    started = time.monotonic()
    # Down rows are neuron-major here, so that what a neuron adds can be measured.
    system = replace(system, has_down_norms=True, down_transposed=False)
    config = read_model(path, options.weight_dtype)
    check_memory(path, system, config, options, 4 * windows.num_logits * config.vocab_size)
    click.echo(
        f"{no_zeros(config)}, so thresholds are calibrated, for --mode threshold (fewer bits a "
        "weight, --dtype q8 or q4, mostly save more)",
        err=True,
    )
    with running_system(system) as running, calibration_bar(config, windows) as step:
        run = Calibration(running, path, config, windows, step, RowBytes.of(served))
        calibrated, found = run.run(target_kld, text)
    identity = ModelIdentity.of(path)
    assert files.thresholds is not None
    write_profile(files.profile, identity, found)
    write_thresholds(files.thresholds, identity, calibrated)
    if files.plot is not None:
        from hotcold.jobs.profile.plot import plot_profile

        plot_profile(files.plot, found, found.layers(config), identity.name)
    told = _report(calibrated, found, served, files, time.monotonic() - started)
    speeds = None
    try:
        speeds = _speeds(path, replace(options, thresholds=files.thresholds))
        click.echo(speed_line(speeds))
    except HotcoldError as problem:  # the files are there all the same
        click.echo(f"not timed: {problem}", err=True)
    return told | {"tokens_per_s": speeds}


def _speeds(path: Path, options: SystemOptions) -> dict[str, float]:
    """Tokens a second in each mode, decoded for about _TIMED_S in a system of its own."""
    from hotcold.jobs.bench.decode import decode_request  # kernels

    found = {}
    for mode in ("dense", THRESHOLD):
        named = options.thresholds if mode == THRESHOLD else None
        asked = replace(options, mode=mode, thresholds=named, speculate="off")
        system, config = prepare_system(path, asked)
        with running_system(system) as running, status_line(f"timing --mode {mode}"):
            most = min(_TIMED_TOKENS, system.context_length - 4)
            first = running.complete(decode_request(config, 2, min(4, most)))
            count = int(_TIMED_S * first.decode_tokens_per_s)
            timed = running.complete(decode_request(config, 2, min(max(4, count), most)))
            found[mode] = timed.decode_tokens_per_s
    return found


def speed_line(speeds: dict[str, float]) -> str:
    """Which mode is faster here, as measured."""
    dense, thresholds = speeds["dense"], speeds[THRESHOLD]
    if thresholds > dense * _WORTH:
        told = f"--mode {THRESHOLD} is the faster one here"
    else:
        told = f"--mode {THRESHOLD} does not pay here; dense is what runs without it"
    return f"decoding: dense {dense:.1f} tokens/s, {THRESHOLD} {thresholds:.1f}: {told}"


def _report(
    calibrated: Calibrated,
    found: ActivationProfile,
    config: ModelConfig,
    files: ProfileFiles,
    seconds: float,
) -> dict[str, Any]:
    """Tell what was found and written; returns it for programs."""
    share, ups = ffn_share(calibrated, config), float(calibrated.up_share.mean())
    downs = f"{float(calibrated.down_share.mean()):.1%} of"
    if RowBytes.of(config).reads_all_down:
        downs = "all of"
    click.echo(
        f"{found.num_tokens} tokens of {found.text_name}, {seconds:.1f} s: mean KL divergence from "
        f"dense {calibrated.mean_kld:.3g} nats\n"
        f"all gates, {ups:.1%} of the up rows and {downs} the down rows are read: "
        f"{share:.1%} of the FFN's bytes"
    )
    for file in files.all:
        click.echo(f"wrote {file}")
    return {
        "tokens": found.num_tokens,
        "seconds": round(seconds, 3),
        "target_kld": calibrated.target_kld,
        "mean_kld": calibrated.mean_kld,
        "up_share": calibrated.up_share.tolist(),
        "down_share": calibrated.down_share.tolist(),
        "ffn_bytes_share": share,
        "path": str(files.profile),
        "thresholds_path": str(files.thresholds),
    }
