"""`hotcold bench decode` and `prefill`: a running system's speed beside what memory allows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import click

from hotcold.actors.kv_cache.pool import num_pages_of
from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS, MATRIX_TOKENS
from hotcold.actors.setup.choose import require_one_mode
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.system import System
from hotcold.jobs.support.console import json_option
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.options import split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import locate_model
from hotcold.model.sampling import SamplingParams
from hotcold.model.weights.sizes import attention_bytes, head_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.placement.machine.measure_node import measure_read_bandwidth
from hotcold.placement.solver.cost import RowBytes

_READ_BYTES = 1 << 30
_Measured = TypeVar("_Measured")


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=16)
@click.option("--tokens", type=click.IntRange(min=2), default=64)
@click.option("--repeat", type=click.IntRange(min=1), default=3)
@click.option(
    "--batch",
    type=click.IntRange(1, KERNEL_TOKENS),
    default=1,
    help="Requests at once, each with a prompt of its own.",
)
@system_options
@json_option
def decode(
    model: str | None,
    prompt_tokens: int,
    tokens: int,
    repeat: int,
    batch: int,
    **values: Any,
) -> dict[str, Any]:
    """Time greedy decoding, and say where a step's time goes."""
    if values["max_batch"] is None and batch > 1:
        values["max_batch"] = batch
    elif values["max_batch"] is not None and batch > values["max_batch"]:
        raise UsageError(
            f"--batch {batch} are more requests than --parallel {values['max_batch']} lets run; "
            "leave out --parallel"
        )

    def measure(running: System, config: ModelConfig) -> list[list[Generation]]:
        requests = [decode_request(config, prompt_tokens, tokens, i) for i in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            return [list(pool.map(running.complete, requests)) for _ in range(repeat)]

    kv_positions = batch * num_pages_of(prompt_tokens + tokens + 1) * PAGE_POSITIONS
    system, config, runs, read_gb_per_s = _run(model, values, measure, kv_positions)
    report = batch_report(system, config, runs, read_gb_per_s)
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in report["per_token_ms"].items())
    each = report["request_tokens_per_s"]
    spread = (
        f" in all, {each['mean']:.2f} each ({each['min']:.2f} to {each['max']:.2f})"
        if batch > 1
        else ""
    )
    click.echo(
        f"decode, batch {batch}, {system.mode}: {report['tokens_per_s']:.2f} tokens/s{spread}; "
        f"{report['density']:.1%} of the neurons computed, {report['ups_computed']:.1%} of the "
        f"ups, {report['gates_computed']:.1%} of the gates\n  ms a step: {parts}\n"
        f"  {size_text(report['bytes_per_token'])} a step: "
        f"{report['gb_per_s']:.1f} GB/s of {read_gb_per_s:.1f} that a plain read gets"
        f"{_read_line(report['reads'])}"
    )
    return report


def _read_line(reads: dict[str, float]) -> str:
    """A line for systems with neurons on storage."""
    if not reads:
        return ""
    return (
        f"\n  storage: {reads['bytes_read'] / 1e6:.1f} MB a step read, "
        f"{reads['hit_rate']:.1%} found in memory, {reads['wait_share']:.1%} of the time waited"
    )


def batch_report(
    system: SystemConfig, config: ModelConfig, runs: list[list[Generation]], read_gb_per_s: float
) -> dict[str, Any]:
    """What `bench decode --json` says of repeated runs of some requests at once.

    The median of all requests' tokens a second, and of the middle run each request's own rate and
    the parts of a step. A step reads its bytes once for a token of each request.
    """
    batch, rates = len(runs[0]), [batch_tokens_per_s(run) for run in runs]
    tokens_per_s = median(rates)
    requests = min(runs, key=lambda run: abs(batch_tokens_per_s(run) - tokens_per_s))
    middle, each = requests[0], [result.decode_tokens_per_s for result in requests]
    token_bytes = _bytes_a_token(config, middle, system)
    gb_per_s = token_bytes * tokens_per_s / batch / 1e9
    return {
        "tokens_per_s": tokens_per_s,
        "batch": batch,
        "request_tokens_per_s": {"min": min(each), "mean": mean(each), "max": max(each)},
        "runs": rates,
        "density": middle.neurons_computed,
        "gates_computed": middle.gates_computed,
        "ups_computed": middle.ups_computed,
        "per_token_ms": middle.per_token_ms,
        "reads": middle.reads,
        "bytes_per_token": token_bytes,
        "gb_per_s": gb_per_s,
        "read_gb_per_s": read_gb_per_s,
        "mode": system.mode,
        "num_threads": system.num_threads,
    }


def batch_tokens_per_s(requests: list[Generation]) -> float:
    """New tokens of all requests a second while the one decodes that was the last to begin.

    They were submitted together. Before its first token the others' steps have prompts in them.
    """
    last = max(requests, key=lambda result: result.queued_s + result.prefill_s)
    return last.decode_tokens_per_s * last.step_tokens


def decode_request(
    config: ModelConfig, prompt_tokens: int, num_tokens: int, number: int = 0
) -> GenerateRequest:
    """Greedy decoding of `num_tokens` after the first, from ids spread over the vocabulary.

    Each `number` has a prompt of its own: equal ones would compute the same neurons. No prompt is
    found in the KV cache.
    """
    ids = [(7 + 97 * number + 31 * i) % config.vocab_size for i in range(prompt_tokens)]
    sampling = SamplingParams(max_tokens=num_tokens + 1, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids, use_cache=False)


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=128)
@click.option("--repeat", type=click.IntRange(min=1), default=3)
@system_options
@json_option
def prefill(model: str | None, prompt_tokens: int, repeat: int, **values: Any) -> dict[str, Any]:
    """Time a prompt up to its first token; one run before the counted ones warms up."""

    def measure(running: System, config: ModelConfig) -> list[Generation]:
        request = decode_request(config, prompt_tokens, 0)
        return [running.complete(request) for _ in range(repeat + 1)][1:]

    system, _, results, read_gb_per_s = _run(model, values, measure)
    rates = [result.prefill_tokens_per_s for result in results]
    report = {
        "tokens_per_s": median(rates),
        "runs": rates,
        "prompt_tokens": prompt_tokens,
        "read_gb_per_s": read_gb_per_s,
        "num_threads": system.num_threads,
    }
    click.echo(f"prefill of {prompt_tokens} tokens: {median(rates):.1f} tokens/s")
    return report


def _run(
    model: str | None,
    values: dict[str, Any],
    measure: Callable[[System, ModelConfig], _Measured],
    kv_positions: int = 1,
) -> tuple[SystemConfig, ModelConfig, _Measured, float]:
    """Start a system, measure in it, and read memory once before and once after: the better one.

    Its KV cache holds `kv_positions` at least, unless --kv-tokens says otherwise.
    """
    path, options = locate_model(model), split_system_options(values)
    if options.speculate == options.draft == "auto":  # bytes a step say little of steps with drafts
        options = replace(options, speculate="off")
    require_one_mode(options)
    system, config = prepare_system(path, options)
    if options.kv_positions is None and kv_positions > system.kv_positions:
        system, config = prepare_system(path, replace(options, kv_positions=kv_positions))
    with running_system(system) as running:
        # What only long prompts need is loaded while idle; here before anything is measured.
        if system.context_length > MATRIX_TOKENS:
            running.complete(decode_request(config, MATRIX_TOKENS, 0))
        # Where memory is short, this must not take much of it.
        read_bytes = _READ_BYTES if system.storage is None else _READ_BYTES // 8
        before = measure_read_bandwidth(system.num_threads, read_bytes)
        results = measure(running, config)
        after = measure_read_bandwidth(system.num_threads, read_bytes)
    return system, config, results, max(before, after)


def _bytes_a_token(config: ModelConfig, result: Generation, system: SystemConfig) -> int:
    """What one step reads: attention, head, predictors, and the FFN's rows that were computed."""
    rows = RowBytes.of(config)
    neurons = config.num_neurons
    ffn = neurons * rows.read(result.gates_computed, result.ups_computed, result.neurons_computed)
    predictors = Path(system.predictors_path).stat().st_size if system.predictors_path else 0
    return int(attention_bytes(config) + head_bytes(config) + predictors + ffn)
