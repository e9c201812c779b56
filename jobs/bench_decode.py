"""`hotcold bench decode` and `prefill`: a running system's speed beside what memory allows."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from actors.messages import GenerateRequest, Generation, SystemConfig
from actors.preflight import prepare_system
from actors.system import System
from jobs.console import json_option, print_json
from jobs.loading import running_system
from jobs.options import split_system_options, system_options
from model.config import ModelConfig
from model.locate import locate_model
from model.sampling import SamplingParams
from model.weights import attention_bytes, head_bytes
from placement.bandwidth import measure_read_bandwidth

_READ_BYTES = 1 << 30


@click.command()
@click.argument("model", required=False)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@system_options
@json_option
def decode(
    model: str | None, prompt_tokens: int, tokens: int, repeat: int, as_json: bool, **values: Any
) -> None:
    """Time greedy decoding, batch 1, and say where a token's time goes."""

    def measure(running: System, config: ModelConfig) -> list[Generation]:
        request = decode_request(config, prompt_tokens, tokens)
        return [running.complete(request) for _ in range(repeat)]

    system, config, results, read_gb_per_s = _run(model, values, measure)
    report = decode_report(system, config, results, read_gb_per_s)
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in report["per_token_ms"].items())
    click.echo(
        f"decode, batch 1, {system.mode}: {report['tokens_per_s']:.2f} tokens/s; "
        f"{report['density']:.1%} of the neurons computed, {report['gates_computed']:.1%} of the "
        f"gates\n  ms a token: {parts}\n  {report['bytes_per_token'] / 1e9:.2f} GB a token: "
        f"{report['gb_per_s']:.1f} GB/s of {read_gb_per_s:.1f} that a plain read gets"
    )
    if as_json:
        print_json(report)


def decode_report(
    system: SystemConfig, config: ModelConfig, results: list[Generation], read_gb_per_s: float
) -> dict[str, Any]:
    """What `bench decode --json` says of repeated runs: the median, and the middle run's parts."""
    rates = [result.decode_tokens_per_s for result in results]
    tokens_per_s = median(rates)
    middle = min(results, key=lambda result: abs(result.decode_tokens_per_s - tokens_per_s))
    token_bytes = _bytes_a_token(config, middle, system)
    gb_per_s = token_bytes * tokens_per_s / 1e9
    return {
        "tokens_per_s": tokens_per_s,
        "runs": rates,
        "density": middle.neurons_computed,
        "gates_computed": middle.gates_computed,
        "per_token_ms": middle.per_token_ms,
        "bytes_per_token": token_bytes,
        "gb_per_s": gb_per_s,
        "read_gb_per_s": read_gb_per_s,
        "mode": system.mode,
        "num_threads": system.num_threads,
    }


def decode_request(config: ModelConfig, prompt_tokens: int, num_tokens: int) -> GenerateRequest:
    """Greedy decoding of `num_tokens` after the first, from ids spread over the vocabulary."""
    ids = [(7 + 31 * i) % config.vocab_size for i in range(prompt_tokens)]
    sampling = SamplingParams(max_tokens=num_tokens + 1, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids)


@click.command()
@click.argument("model", required=False)
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@system_options
@json_option
def prefill(
    model: str | None, prompt_tokens: int, repeat: int, as_json: bool, **values: Any
) -> None:
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
    if as_json:
        print_json(report)


def _run(
    model: str | None,
    values: dict[str, Any],
    measure: Callable[[System, ModelConfig], list[Generation]],
) -> tuple[SystemConfig, ModelConfig, list[Generation], float]:
    """Start a system, measure in it, and read memory once before and once after: the better one."""
    system, config = prepare_system(locate_model(model), split_system_options(values))
    with running_system(system) as running:
        before = measure_read_bandwidth(system.num_threads, _READ_BYTES)
        results = measure(running, config)
        after = measure_read_bandwidth(system.num_threads, _READ_BYTES)
    return system, config, results, max(before, after)


def _bytes_a_token(config: ModelConfig, result: Generation, system: SystemConfig) -> int:
    """What one token reads: attention, head, predictors, and the FFN's rows that were computed."""
    row = config.hidden_size * config.item_bytes
    neurons = config.num_layers * config.ffn_size
    rest = 2 if config.has_gate else 1
    ffn = neurons * row * (result.gates_computed + rest * result.neurons_computed)
    predictors = Path(system.predictors_path).stat().st_size if system.predictors_path else 0
    return int(attention_bytes(config) + head_bytes(config) + predictors + ffn)
