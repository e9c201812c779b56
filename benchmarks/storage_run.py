"""One system with neurons on storage, measured: decoding, a prompt, a mixed load; one line of JSON.

    python -m benchmarks.storage_run MODEL --cpu-memory 3GiB --without cache

`benchmarks/storage.py` runs it in a memory cgroup. What is left out of how neurons are read, by
`--without`, is left out by this program alone; no option of hotcold does that.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from actors.protocol.stored_neurons import PARTS
from actors.setup.preflight import SystemOptions, prepare_system
from actors.system import System
from jobs.bench.decode import decode_request
from jobs.support.loading import running_system
from jobs.support.options import Bytes
from model.config.model_config import ModelConfig
from model.sampling import SamplingParams

AHEAD = "ahead"
_WARM_TOKENS = 24  # with which slots fill; not counted
_PROMPT = 16
_LOAD_PROMPTS = (1, 16, 40, 200, 500)
_LOAD_REQUESTS = 3


def prepared(
    path: Path, options: SystemOptions, without: Sequence[str]
) -> tuple[SystemConfig, ModelConfig]:
    """The system, and the model's config; parts of how neurons are read are left out."""
    system, config = prepare_system(path, options)
    if system.storage is None:
        return system, config
    storage = replace(system.storage, without=tuple(part for part in without if part != AHEAD))
    if AHEAD in without:
        storage = replace(storage, predictors="")
    return replace(system, storage=storage), config


def token_times(running: System, request: GenerateRequest) -> tuple[list[float], Generation | None]:
    """Seconds between new tokens, and the finished request."""
    times: list[float] = []
    done, before = None, 0.0
    for event in running.generate(request):
        now = time.perf_counter()
        if event.num_tokens and before:
            times += event.num_tokens * [(now - before) / event.num_tokens]
        before = now
        done = event.result
    return times, done


def mixed_load(running: System, config: ModelConfig, seconds: float) -> int:
    """Requests with prompts of several lengths, three at once; how many there were."""
    ends = time.monotonic() + seconds

    def ask(seed: int) -> int:
        draw, count = random.Random(seed), 0
        while time.monotonic() < ends:
            size = draw.choice(_LOAD_PROMPTS)
            ids = [draw.randrange(config.vocab_size) for _ in range(size)]
            sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            running.complete(GenerateRequest(sampling, prompt_ids=ids))
            count += 1
        return count

    with ThreadPoolExecutor(_LOAD_REQUESTS) as pool:
        return sum(pool.map(ask, range(_LOAD_REQUESTS)))


def measure(
    running: System, config: ModelConfig, tokens: int, prompt: int, load_s: float
) -> dict[str, Any]:
    """What `benchmarks.storage` makes its table of."""
    running.complete(decode_request(config, _PROMPT, _WARM_TOKENS, 1))
    times, done = token_times(running, decode_request(config, _PROMPT, tokens, 2))
    assert done is not None
    report = {
        "tokens_per_s": done.decode_tokens_per_s,
        "mean_ms": 1e3 * float(np.mean(times)),
        "p99_ms": 1e3 * float(np.quantile(times, 0.99)),
        "reads": done.reads,
        "per_token_ms": done.per_token_ms,
        "density": done.neurons_computed,
        "prompt_tokens_per_s": 0.0,
        "num_requests": 0,
    }
    if prompt:
        running.complete(decode_request(config, prompt, 0, 3))
        long = running.complete(decode_request(config, prompt, 0, 4))
        report["prompt_tokens_per_s"] = long.prefill_tokens_per_s
    if load_s:
        report["num_requests"] = mixed_load(running, config, load_s)
    return report


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--cpu-memory", "size", type=Bytes(), help="All that there is without it.")
@click.option("--mode", default="exact", show_default=True)
@click.option("--dtype", help="As of `hotcold generate`.")
@click.option("--tokens", default=64, show_default=True)
@click.option("--prompt", default=0, show_default=True, help="Also measure one of so many tokens.")
@click.option("--load", "load_s", default=0.0, help="Then a mixed load of so many seconds.")
@click.option("--context", default=1024, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--without", multiple=True, type=click.Choice([*PARTS, AHEAD]))
def main(
    model: Path,
    size: int | None,
    mode: str,
    dtype: str | None,
    tokens: int,
    prompt: int,
    load_s: float,
    context: int,
    threads: int,
    without: Sequence[str],
) -> None:
    """Measure MODEL once."""
    options = SystemOptions(
        mode=mode,
        weight_dtype=dtype,
        num_threads=threads,
        context_length=context,
        cpu_memory_bytes=size,
        max_batch=_LOAD_REQUESTS,
    )
    system, config = prepared(model, options, without)
    with running_system(system) as running:
        report = measure(running, config, tokens, prompt, load_s)
    report["file"] = "" if system.storage is None else system.storage.path
    print(json.dumps(report))


if __name__ == "__main__":
    main()
