"""hotcold's half of the comparison: running systems, measured as llama.cpp is.

    python -m benchmarks.hotcold_side MODEL --dtype q8 --mode exact

starts a system, answers with one token, says so in a line of JSON and stops: how long a load takes.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import click
import ray
import torch

from benchmarks.llama_cpp import BATCH_PROMPT, Sizes, run_program
from benchmarks.process_memory import memory_of
from benchmarks.runs import Json
from hotcold.actors.launch import start_local_ray
from hotcold.actors.protocol.messages import MODES, THRESHOLD, Generation, SystemConfig
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.setup.shards import arena_layout
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import batch_tokens_per_s, decode_report, decode_request
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.placement.machine.measure_node import measure_read_bandwidth

DTYPES = ("f16", "q8", "q4")
AS_STORED = "as stored"  # of a GGUF file, which both programs read
_PROMPT = 16  # tokens before those that are decoded
_READ_BYTES, _READ_S = 1 << 29, 0.2
_WARM_UP = 8  # tokens
_KV_PAGE = 64  # positions
_FEATURES = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "neon")


@dataclass(frozen=True)
class Prepared:
    """A system that can be started: one mode of a model in one format."""

    mode: str
    system: SystemConfig
    config: ModelConfig

    @classmethod
    def of(
        cls, model: Path, dtype: str, mode: str, sizes: Sizes, thresholds: Path | None = None
    ) -> "Prepared":
        """Check model and options; `thresholds` are for that mode alone. Errors: HotcoldError."""
        batch = max(sizes.batches, default=1)
        options = SystemOptions(
            mode=mode,
            num_threads=sizes.threads,
            max_batch=batch,
            speculate="off",
            weight_dtype=None if dtype in ("f16", AS_STORED) else dtype,  # f16 is the model's own
            thresholds=thresholds if mode == THRESHOLD else None,
        )
        system, config = prepare_system(model, options)
        pages = batch * -(-(BATCH_PROMPT + sizes.tokens + 1) // _KV_PAGE)
        room = max(system.context_length, pages * _KV_PAGE)
        return cls(mode, replace(system, kv_positions=room), config)


@contextmanager
def loaded(prepared: list[Prepared]) -> Iterator[list[System]]:
    """All these systems, started and warm, in a Ray of their own."""
    arenas = sum(arena_layout(each.system, each.config).num_bytes for each in prepared)
    threads = sum(each.system.num_threads for each in prepared)
    start_local_ray(threads, arenas)
    try:
        with ExitStack() as stack:
            running = [stack.enter_context(System.start(each.system)) for each in prepared]
            for system, each in zip(running, prepared, strict=True):
                if each.system.context_length > MATRIX_TOKENS:  # what long prompts need is had late
                    system.complete(decode_request(each.config, MATRIX_TOKENS, 0))
                system.complete(decode_request(each.config, _PROMPT, _WARM_UP))
            yield running
    finally:
        ray.shutdown()


def instructions() -> str:
    """What hotcold's kernels are compiled for here, and what torch is limited to."""
    own = [name for name in _FEATURES if has_feature(name)]
    torch_own = torch.backends.cpu.get_cpu_capability()
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "no limit")
    return f"kernels for {', '.join(own) or 'plain vectors'}; torch for {torch_own}; oneDNN: {most}"


def measure(running: System, prepared: Prepared, sizes: Sizes, with_prefill: bool) -> Json:
    """One round of a running system: decode, batches, prompts and memory.

    decode as `hotcold bench decode` reports it, beside a plain read of memory; prefill and batch
    as in `benchmarks.llama_cpp.measure`. A prompt is dense in every mode, so one mode's will do.
    """
    system, config = prepared.system, prepared.config
    results = [running.complete(decode_request(config, _PROMPT, sizes.tokens))]
    read_gb_per_s = measure_read_bandwidth(sizes.threads, _READ_BYTES, _READ_S)
    found = decode_report(system, config, results, read_gb_per_s)
    found["batch"] = {
        str(batch): _measure_batch(running, config, batch, sizes.tokens) for batch in sizes.batches
    }
    lengths = sizes.prompt_tokens if with_prefill else ()
    found["prefill"] = {str(length): _measure_prompt(running, config, length) for length in lengths}
    return found | memory_of(running.call("processes").values())


def measure_load(prepared: Prepared, model: Path, dtype: str) -> float:
    """Seconds from a process's start to its first token."""
    command = [sys.executable, "-m", "benchmarks.hotcold_side", str(model), "--dtype", dtype]
    command += ["--mode", prepared.mode, "--threads", str(prepared.system.num_threads)]
    if prepared.system.thresholds_path:
        command += ["--thresholds", prepared.system.thresholds_path]
    return run_program(command).first_row_s


def batch_report(results: list[Generation]) -> Json:
    """What requests that ran side by side got.

    slowest_share = the slowest request's speed / the mean of all
    """
    rates = [result.decode_tokens_per_s for result in results]
    return {
        "tokens_per_s": batch_tokens_per_s(results),
        "slowest_share": min(rates) / mean(rates),
        "requests_tokens_per_s": rates,
    }


def _measure_batch(running: System, config: ModelConfig, batch: int, num_tokens: int) -> Json:
    requests = [decode_request(config, BATCH_PROMPT, num_tokens, number) for number in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        return batch_report(list(pool.map(running.complete, requests)))


def _measure_prompt(running: System, config: ModelConfig, length: int) -> Json:
    """Seconds to the first token are those of the caller, the way to the driver and back too."""
    started = time.perf_counter()
    result = running.complete(decode_request(config, length, 0))
    first_token_s = time.perf_counter() - started
    return {"tokens_per_s": result.prefill_tokens_per_s, "first_token_s": first_token_s}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--dtype", type=click.Choice([*DTYPES, AS_STORED]), default="f16", show_default=True)
@click.option("--mode", type=click.Choice(MODES), default="exact", show_default=True)
@click.option("--thresholds", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", default=2, show_default=True)
def main(model: Path, dtype: str, mode: str, thresholds: Path | None, threads: int) -> None:
    """Start MODEL, answer with one token, say so, stop."""
    prepared = Prepared.of(model, dtype, mode, Sizes(threads, 1), thresholds)
    with System.start(prepared.system) as running:
        running.complete(decode_request(prepared.config, 1, 0))
        click.echo(json.dumps({"ready": True}))


if __name__ == "__main__":
    main()
