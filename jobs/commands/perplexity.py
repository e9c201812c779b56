"""`hotcold perplexity`: how well a mode predicts a text, and what it changes beside dense.

The definition is that of llama.cpp's llama-perplexity, so that figures can stand side by side: the
text is cut into windows, each opened by bos where the tokenizer opens texts so; of each window the
second half is scored, every token from all before it in the window.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from hotcold.actors.protocol.messages import THRESHOLD, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.support.console import json_option, steps_bar
from hotcold.jobs.support.options import split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.jobs.support.workers import begin_workers
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import locate_model

if TYPE_CHECKING:
    from hotcold.actors.driver.prompts import Prompts
    from hotcold.actors.driver.scoring import WindowScores
    from hotcold.actors.system import System
    from hotcold.model.config.model_config import ModelConfig

_WINDOW = 512
_MIN_WINDOW = 32


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option(
    "--text",
    "text_path",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text, or JSON lines of documents.",
)
@click.option(
    "--context-window",
    "window",
    type=int,
    help=f"Tokens of each window; {_WINDOW}, or what the model allows, without it.",
)
@click.option("--max-windows", type=click.IntRange(min=1), help="Score only the first so many.")
@click.option(
    "--recall/--no-recall",
    default=True,
    help="Count neurons, and of those that fire how many the predictor chose; token by token, so "
    "slower.",
)
@system_options
@json_option
def perplexity(
    model: str | None,
    text_path: Path,
    window: int | None,
    max_windows: int | None,
    recall: bool,
    **values: Any,
) -> dict[str, Any]:
    """Score MODEL on a text, and compare the mode with dense (the embedded model without MODEL)."""
    path = locate_model(model)
    begin_workers()
    from hotcold.actors.driver.prompts import Prompts
    from hotcold.actors.setup.choose import require_one_mode
    from hotcold.jobs.support.loading import running_system
    from hotcold.model.config.build import read_config

    config = read_config(path)
    options = split_system_options(values)
    require_one_mode(options)
    size = _window_size(window, options.context_length, config)
    windows = _windows(text_path, Prompts(path, config, size), size)[:max_windows]
    size = len(windows[0])
    system, config = _prepare(path, options, size)
    with running_system(system) as running:
        started = time.monotonic()
        scores = _score(running, windows, recall and system.mode != "dense")
        tokens_per_s = len(windows) * size / (time.monotonic() - started)
    report = {
        **summary(scores, config.num_neurons, system.mode),
        "mode": system.mode,
        "context_window": size,
        "windows": len(windows),
        "tokens_per_s": tokens_per_s,
    }
    _show(report)
    return report


def _window_size(window: int | None, context_length: int | None, config: ModelConfig) -> int:
    most = config.max_positions
    size = min(_WINDOW, most) if window is None else window
    if not min(_MIN_WINDOW, most) <= size <= most:
        raise UsageError(
            f"--context-window is {size}; give a number from {_MIN_WINDOW} to {most}, which this "
            "model allows"
        )
    if context_length is not None and context_length < size:
        raise UsageError(
            f"--context is {context_length}, less than a window of {size} tokens; leave it out or "
            "give a smaller --context-window"
        )
    return size


def _windows(text_path: Path, prompts: Prompts, size: int) -> list[list[int]]:
    """Whole windows of `size` ids; a text shorter than one is one window of its own length."""
    from hotcold.jobs.support.text_file import read_text_ids

    ids = read_text_ids(text_path, prompts).ids.tolist()
    bos = prompts.bos_id
    if bos is not None:
        ids.insert(0, bos)
    if len(ids) < min(size, _MIN_WINDOW):
        raise UsageError(
            f"{text_path}: has {len(ids)} tokens, too few to score; give a text of at least "
            f"{_MIN_WINDOW}"
        )
    if len(ids) < size:
        click.echo(
            f"the text has {len(ids)} tokens, fewer than a window of {size}: one window of "
            f"{len(ids)}",
            err=True,
        )
        size = len(ids)
    windows = [ids[begin : begin + size] for begin in range(0, len(ids) - size + 1, size)]
    return windows if bos is None else [[bos, *window[1:]] for window in windows]


def _prepare(path: Path, options: SystemOptions, size: int) -> tuple[SystemConfig, ModelConfig]:
    """As `prepare_system`, with a KV cache for the window and memory for the dense logits."""
    from hotcold.actors.setup.preflight import prepare_system

    if options.context_length is None:
        options = replace(options, context_length=size)
    system, config = prepare_system(path, options)
    if system.mode != "dense":
        logits_bytes = size // 2 * config.vocab_size * 4
        system, config = prepare_system(path, options, extra_bytes=logits_bytes)
    return system, config


def _score(running: System, windows: list[list[int]], audit: bool) -> list[WindowScores]:
    scores: list[WindowScores] = []
    with steps_bar("scoring", len(windows)) as show:
        for ids in windows:
            scores.append(running.call("score_window", ids, len(ids) // 2, audit))
            nll = np.concatenate([score.nll for score in scores])
            show(len(scores), description=f"ppl {_exp(nll.mean()):.4f}")
    return scores


def summary(scores: list[WindowScores], num_neurons: int, mode: str) -> dict[str, Any]:
    """Figures over all windows' scored tokens; None where there is nothing to say.

    num_neurons: of all layers
    ppl = exp(mean nll), ppl_stderr = ppl * standard error of mean nll. Shares are 0..1.
    neurons_computed: listed by the predictor, or those that fire where none predicts, per token;
    ups_computed: those whose up row was read;
    recall[l] = fired and listed / fired, precision[l] = fired and listed / listed, of layer l
    """
    nll = np.concatenate([score.nll for score in scores])
    mean, stderr = _mean_and_stderr(nll)
    ppl = _exp(mean)
    report: dict[str, Any] = {
        "tokens": nll.size,
        "ppl": _finite(ppl),
        "ppl_stderr": None if stderr is None else _finite(ppl * stderr),
        **dict.fromkeys(("ppl_dense", "ln_ppl_ratio", "ln_ppl_ratio_stderr", "mean_kld")),
        **dict.fromkeys(("kld_stderr", "kld_p99", "kld_max", "same_top_p", "same_top_p_stderr")),
        "neurons_computed": 1.0 if mode == "dense" else None,
        "ups_computed": 1.0 if mode == "dense" else None,
        "recall": None,
        "precision": None,
    }
    return report | _against_dense(scores) | _neurons(scores, num_neurons)


def _against_dense(scores: list[WindowScores]) -> dict[str, Any]:
    if scores[0].kld is None:
        return {}
    nll, nll_dense, kld, same_top = (
        np.concatenate([getattr(score, name) for score in scores])
        for name in ("nll", "nll_dense", "kld", "same_top")
    )
    ratio, ratio_stderr = _mean_and_stderr(nll - nll_dense)
    mean_kld, kld_stderr = _mean_and_stderr(kld)
    same_top_p, same_top_p_stderr = _mean_and_stderr(same_top.astype(np.float64))
    return {
        "ppl_dense": _finite(_exp(nll_dense.mean())),
        "ln_ppl_ratio": ratio,
        "ln_ppl_ratio_stderr": ratio_stderr,
        "mean_kld": mean_kld,
        "kld_stderr": kld_stderr,
        "kld_p99": float(np.percentile(kld, 99)),
        "kld_max": float(kld.max()),
        "same_top_p": same_top_p,
        "same_top_p_stderr": same_top_p_stderr,
    }


def _neurons(scores: list[WindowScores], num_neurons: int) -> dict[str, Any]:
    counts = scores[0].counts
    if counts is None:
        return {}
    for score in scores[1:]:
        counts += score.counts  # type: ignore[operator]  # all were audited or none was
    num_all = counts.num_tokens * num_neurons
    ups_computed = int(counts.num_up.sum()) / num_all
    if not scores[0].predicts:
        neurons_computed = int(counts.num_fired.sum()) / num_all
        return {"neurons_computed": neurons_computed, "ups_computed": ups_computed}
    return {
        "ups_computed": ups_computed,
        "neurons_computed": int(counts.num_listed.sum()) / num_all,
        "recall": _shares(counts.num_fired_listed, counts.num_fired),
        "precision": _shares(counts.num_fired_listed, counts.num_listed),
    }


def _shares(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    return [
        part / whole if whole else None
        for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)
    ]


def _mean_and_stderr(values: np.ndarray) -> tuple[float, float | None]:
    """The mean, and sqrt((mean(x^2) - mean(x)^2) / (count - 1)); None of a single value."""
    stderr = float(np.sqrt(values.var() / (values.size - 1))) if values.size > 1 else None
    return float(values.mean()), stderr


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _show(report: dict[str, Any]) -> None:
    click.echo(
        f"ppl {_number(report['ppl'], '.4f')} ± {_number(report['ppl_stderr'], '.4f')}  "
        f"({report['mode']}; {report['tokens']} tokens scored in {report['windows']} windows of "
        f"{report['context_window']}; {report['tokens_per_s']:.1f} tokens/s)"
    )
    if report["mean_kld"] is not None:
        click.echo(
            f"dense ppl {_number(report['ppl_dense'], '.4f')}, ln(ppl / dense) "
            f"{report['ln_ppl_ratio']:.4g} ± {_number(report['ln_ppl_ratio_stderr'], '.2g')}\n"
            f"KLD {report['mean_kld']:.4g} ± {_number(report['kld_stderr'], '.2g')}, "
            f"99% {report['kld_p99']:.4g}, maximum {report['kld_max']:.4g}\n"
            f"same likeliest token {report['same_top_p']:.3%} ± "
            f"{_number(report['same_top_p_stderr'], '.3%')}"
        )
    if report["neurons_computed"] is not None:
        ups = f", ups {report['ups_computed']:.1%}" if report["mode"] == THRESHOLD else ""
        click.echo(f"neurons computed {report['neurons_computed']:.1%}{ups}")
    if report["recall"] is not None:
        known = [share for share in report["recall"] if share is not None]
        least = f"{min(known):.2%}" if known else "-"
        for name in ("recall", "precision"):
            shares = " ".join(_number(share, ".2%") for share in report[name])
            click.echo(f"{name} by layer: {shares}" + (f"  (least {least})" * (name == "recall")))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
