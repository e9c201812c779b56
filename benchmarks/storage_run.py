"""One system with neurons on storage, measured: decoding, a prompt, a mixed load; one line of JSON.

    python -m benchmarks.storage_run MODEL --cpu-memory 3GiB --without cache

`benchmarks/storage.py` runs it in a memory cgroup. What is left out of how neurons are read, by
`--without`, is left out by this program alone; no option of hotcold does that.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import AHEAD, PARTS
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import decode_request
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.options import Bytes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sampling import SamplingParams
from hotcold.placement.machine.measure_disk import measure_disk

_WARM_TOKENS = 24  # with which slots fill; not counted
_PROMPT = 16
_LOAD_PROMPTS = (1, 16, 40, 200, 500)
_LOAD_REQUESTS, _LOAD_TOKENS = 3, 16
_TURNS, _TURN = 4, 60  # of a conversation; tokens that each adds


def prepared(
    path: Path, options: SystemOptions, without: Sequence[str]
) -> tuple[SystemConfig, ModelConfig]:
    """The system, and the model's config; parts of how neurons are read are left out."""
    system, config = prepare_system(path, options)
    if system.storage is None:
        return system, config
    storage = replace(system.storage, without=tuple(without))
    if AHEAD in without:
        storage = replace(storage, predictors="", memory_bytes=0)  # nor found beside a GPU
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


def mixed_load(running: System, config: ModelConfig, seconds: float) -> dict[str, int]:
    """Requests of several kinds, three at once; how many there were of each.

    Answers to prompts of several lengths, some of them cancelled in the middle, and conversations
    whose turns begin with all that was said before.
    """
    ends, kinds = time.monotonic() + seconds, (_answer, _answer, _cancelled, _conversation)

    def ask(seed: int) -> Counter[str]:
        draw, counts = random.Random(seed), Counter[str]()
        while time.monotonic() < ends:
            counts.update(draw.choice(kinds)(running, config, draw))
        return counts

    with ThreadPoolExecutor(_LOAD_REQUESTS) as pool:
        return dict(sorted(sum(pool.map(ask, range(_LOAD_REQUESTS)), Counter[str]()).items()))


def _ids(config: ModelConfig, draw: random.Random, size: int) -> list[int]:
    return [draw.randrange(config.vocab_size) for _ in range(size)]


def _request(ids: list[int], num_tokens: int, name: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids, request_id=name)


def _answer(running: System, config: ModelConfig, draw: random.Random) -> dict[str, int]:
    ids = _ids(config, draw, draw.choice(_LOAD_PROMPTS))
    running.complete(_request(ids, _LOAD_TOKENS))
    return {"answers": 1}


def _cancelled(running: System, config: ModelConfig, draw: random.Random) -> dict[str, int]:
    """Cancelled after some tokens, or after a part of its prompt."""
    ids, name = _ids(config, draw, draw.choice(_LOAD_PROMPTS)), f"cancelled-{draw.random()}"
    last = draw.randrange(_LOAD_TOKENS)
    for number, _ in enumerate(running.generate(_request(ids, 4 * _LOAD_TOKENS, name))):
        if number == last:
            running.cancel(name)
    return {"cancelled": 1}


def _conversation(running: System, config: ModelConfig, draw: random.Random) -> dict[str, int]:
    said = _ids(config, draw, _TURN)
    for _ in range(_TURNS):
        said += running.complete(_request(said, _LOAD_TOKENS)).ids + _ids(config, draw, _TURN)
    return {"turns of conversations": _TURNS}


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
        "requests": {},
    }
    if prompt:
        running.complete(decode_request(config, prompt, 0, 3))
        long = running.complete(decode_request(config, prompt, 0, 4))
        report["prompt_tokens_per_s"] = long.prefill_tokens_per_s
    if load_s:
        report["requests"] = mixed_load(running, config, load_s)
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
@click.option("--read-bytes", type=Bytes(), default="16KiB", show_default=True)
@click.option("--without", multiple=True, type=click.Choice(PARTS))
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
    read_bytes: int,
    without: Sequence[str],
) -> None:
    """Measure MODEL once, then the disk alone by reads of that size where neurons are on it."""
    options = SystemOptions(
        mode=mode,
        weight_dtype=dtype,
        num_threads=threads,
        context_length=context,
        cpu_memory_bytes=size,
        max_batch=_LOAD_REQUESTS,
        speculate="off",
    )
    system, config = prepared(model, options, without)
    with running_system(system) as running:
        report = measure(running, config, tokens, prompt, load_s)
    report["disk_bytes_per_s"] = 0.0
    if system.storage is not None:
        report["disk_bytes_per_s"] = measure_disk(Path(system.storage.path), [read_bytes])[0]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
