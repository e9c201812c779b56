"""`hotcold profile` of models whose activations are never zero: thresholds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.setup.modes import ffn_share, no_zeros, require_memory_to_calibrate
from hotcold.actors.setup.preflight import SystemOptions, check_memory, prepare_system, read_model
from hotcold.jobs.profile.files import ProfileFiles
from hotcold.jobs.support.console import print_json
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.text_file import read_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import ActivationProfile, write_profile
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import Calibrated, write_thresholds


def calibrate(
    path: Path,
    options: SystemOptions,
    files: ProfileFiles,
    text_path: Path | None,
    max_tokens: int | None,
    target_kld: float,
    as_json: bool,
) -> None:
    """Make thresholds, and the profile of the neurons that pass them. Errors: HotcoldError."""
    from hotcold.jobs.profile.calibration import (  # torch
        WINDOW,
        Calibration,
        Windows,
        calibration_bar,
    )

    length = min(WINDOW, read_model(path).max_positions)
    options = replace(options, context_length=length)
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
    _report(calibrated, found, served, files, time.monotonic() - started, as_json)


def _report(
    calibrated: Calibrated,
    found: ActivationProfile,
    config: ModelConfig,
    files: ProfileFiles,
    seconds: float,
    as_json: bool,
) -> None:
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
    click.echo(
        "--mode threshold uses them; of small models dense may be faster all the same: `hotcold "
        "bench decode` measures each --mode"
    )
    if as_json:
        print_json(
            {
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
        )
