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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np

from benchmarks.stored_system import on_storage
from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import AHEAD, PARTS
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import decode_request
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.offload_plan import OffloadPlan, measured_disk, offload_plan
from hotcold.jobs.support.options import Bytes
from hotcold.jobs.support.text_file import read_text_ids
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.placement.machine.measure_disk import measure_disk

_PROMPT = 16
_LOAD_PROMPTS = (1, 16, 40, 200, 500)
_LOAD_REQUESTS, _LOAD_TOKENS = 3, 16
_TURNS, _TURN = 4, 60  # of a conversation; tokens that each adds


def prepared(
    path: Path, options: SystemOptions, without: Sequence[str], resident: float | None = None
) -> tuple[SystemConfig, ModelConfig]:
    """The system, and the model's config; parts of how neurons are read are left out.

    `resident`: this share of the neurons is in memory, instead of what options say
    """
    system, config = prepare_system(path, options)
    if resident is not None:
        system = on_storage(replace(system, plan_path=""), resident)
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


def prompts_of(text: Path | None, path: Path, config: ModelConfig, count: int) -> list[list[int]]:
    """`count` prompts of 16 tokens: of places spread over a text, else ids all over the vocabulary.

    Errors:  UsageError where the text is too short
    """
    if text is None:
        found = [decode_request(config, _PROMPT, 0, number).prompt_ids for number in range(count)]
        return [list(ids or []) for ids in found]
    ids = read_text_ids(text, Prompts(path, config, config.max_positions)).ids
    if ids.size < count * _PROMPT:
        raise UsageError(f"{text}: has {ids.size} tokens; give one of {count * _PROMPT} or more")
    first = [ids.size // count * number for number in range(count)]
    return [ids[at : at + _PROMPT].tolist() for at in first]


def answer(prompt: list[int], num_tokens: int, seed: int) -> GenerateRequest:
    """Drawn by the model's own probabilities: the likeliest tokens alone soon repeat themselves."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=prompt, use_cache=False)


def measure_answers(
    running: System, prompts: Sequence[list[int]], num_tokens: int
) -> dict[str, Any]:
    """Answers to all prompts but the first, with which slots fill, one after the other."""
    times: list[float] = []
    results: list[Generation] = []
    for seed, prompt in enumerate(prompts):
        found, done = token_times(running, answer(prompt, num_tokens + 1, seed))
        assert done is not None
        if seed:
            times += found
            results.append(done)

    def middle(find: Callable[[Generation], float]) -> float:
        return mean(find(done) for done in results)

    return {
        "tokens_per_s": num_tokens / middle(lambda done: done.decode_s),
        "answers_tokens_per_s": [done.decode_tokens_per_s for done in results],
        "answers_bytes_read": [done.reads.get("bytes_read", 0.0) for done in results],
        "mean_ms": 1e3 * float(np.mean(times)),
        "p99_ms": 1e3 * float(np.quantile(times, 0.99)),
        "reads": {
            name: middle(lambda done, name=name: done.reads.get(name, 0.0))  # type: ignore[misc]
            for name in results[0].reads
        },
        "per_token_ms": {
            part: middle(lambda done, part=part: done.per_token_ms[part])  # type: ignore[misc]
            for part in results[0].per_token_ms
        },
        "density": middle(lambda done: done.neurons_computed),
    }


def measure(
    running: System,
    config: ModelConfig,
    prompts: Sequence[list[int]],
    tokens: int,
    prompt: int,
    load_s: float,
) -> dict[str, Any]:
    """What `benchmarks.storage` makes its table of."""
    report = measure_answers(running, prompts, tokens)
    report |= {"prompt_tokens_per_s": 0.0, "requests": {}}
    if prompt:
        running.complete(decode_request(config, prompt, 0, 3))
        long = running.complete(decode_request(config, prompt, 0, 4))
        report["prompt_tokens_per_s"] = long.prefill_tokens_per_s
    if load_s:
        report["requests"] = mixed_load(running, config, load_s)
    return report


def planned(
    path: Path, system: SystemConfig, config: ModelConfig, memory_ms: float, head_ms: float
) -> OffloadPlan:
    """What `hotcold plan` would say, with the disk as it is now, and memory as it was measured."""
    assert system.storage is not None
    profile = own_profile(path, config)
    disk = measured_disk(Path(system.storage.path), config)
    times_s = memory_ms / 1e3, head_ms / 1e3
    return offload_plan(system, config, system.storage, profile, disk, *times_s)


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--cpu-memory", "size", type=Bytes(), help="All that there is without it.")
@click.option("--resident", type=click.FloatRange(0, 1), help="Share of the neurons in memory.")
@click.option("--mode", default="exact", show_default=True)
@click.option("--dtype", help="As of `hotcold generate`.")
@click.option("--tokens", default=64, show_default=True, help="Of an answer.")
@click.option("--answers", default=4, show_default=True, help="After one that warms up.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="To take prompts of.")
@click.option("--memory-ms", default=0.0, help="Of a token with all in memory: for a plan.")
@click.option("--head-ms", default=0.0, help="Of these: the head's.")
@click.option("--prompt", default=0, show_default=True, help="Also measure one of so many tokens.")
@click.option("--load", "load_s", default=0.0, help="Then a mixed load of so many seconds.")
@click.option("--context", default=1024, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--read-bytes", type=Bytes(), default="16KiB", show_default=True)
@click.option("--without", multiple=True, type=click.Choice(PARTS))
def main(
    model: Path,
    size: int | None,
    resident: float | None,
    mode: str,
    dtype: str | None,
    tokens: int,
    answers: int,
    text: Path | None,
    memory_ms: float,
    head_ms: float,
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
    system, config = prepared(model, options, without, resident)
    prompts = prompts_of(text, model, config, 1 + answers)
    with running_system(system) as running:
        report = measure(running, config, prompts, tokens, prompt, load_s)
    report |= {"disk_bytes_per_s": 0.0, "plan": {}, "services": system.num_cpu_actors}
    if system.storage is not None:
        report["disk_bytes_per_s"] = measure_disk(Path(system.storage.path), [read_bytes])[0]
        if memory_ms:
            report["plan"] = asdict(planned(model, system, config, memory_ms, head_ms))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
