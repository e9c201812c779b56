"""`hotcold compile`: all kernels of a model ahead of its first use, for images and CI."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.support.console import json_option, steps_bar
from hotcold.jobs.support.options import split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.jobs.support.workers import begin_workers
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import locate_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig

_MANY_TOKENS = 64  # of a prompt: more than kernels of few tokens take


@click.command("compile", cls=GroupedCommand)
@click.argument("model", required=False)
@system_options
@json_option
def compile_kernels(model: str | None, **values: Any) -> dict[str, Any]:
    """Compile the kernels of MODEL (the embedded demo model without it), once.

    A system is started as `generate` starts it with the same options, and asked for what needs
    kernels. They are kept on disk, for this CPU: the first start of the model then takes as long
    as any other.
    """
    path = locate_model(model)
    begin_workers()
    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.support.loading import running_system
    from hotcold.numba_kernels.own_cache import own_folder

    options: SystemOptions = split_system_options(values)
    try:
        folder = own_folder("numba")
    except OSError:  # a line on standard error has said why
        raise ServiceError("compiled kernels cannot be kept, so there is no use in them") from None
    before, began = _cached(folder), time.monotonic()
    system, config = prepare_system(path, options)
    requests = list(_requests(system, config.vocab_size))
    bar = steps_bar("compiling kernels of requests", len(requests))
    with running_system(system) as running, bar as show:
        for number, request in enumerate(requests, 1):
            running.complete(request)
            show(number)
    after = _cached(folder)
    num_new, num_bytes = len(after.keys() - before.keys()), sum(after.values())
    seconds = time.monotonic() - began
    what = f"compiled {num_new} kernels" if num_new else "all kernels had been compiled"
    click.echo(f"{what}, {seconds:.1f} s; {folder} has {num_bytes / 1e6:.1f} MB")
    return {"compiled": num_new, "folder": str(folder), "seconds": round(seconds, 3)}


def _cached(folder: Path) -> dict[Path, int]:
    """Bytes of each compiled kernel in the cache."""
    return {path: path.stat().st_size for path in folder.glob("**/*.nbc")}


def _requests(system: SystemConfig, vocab_size: int) -> Iterator[GenerateRequest]:
    """Requests that together need all kernels: few and many tokens, each way to choose a token."""
    from hotcold.actors.protocol.messages import GenerateRequest
    from hotcold.model.sampling import SamplingParams

    def request(num_tokens: int, sampling: dict[str, Any], **changes: Any) -> GenerateRequest:
        count = max(1, min(num_tokens, system.context_length - 2))
        ids = [number % vocab_size for number in range(count)]
        params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, **sampling)
        return GenerateRequest(params, prompt_ids=ids, use_cache=False, **changes)

    yield request(1, {"temperature": 0.0})
    yield request(_MANY_TOKENS, {"temperature": 0.0}, num_logprobs=1)
    yield request(8, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05})
    yield request(8, {"temperature": 1.0, "typical_p": 0.9, "top_n_sigma": 1.0})
    yield request(8, {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1})
    yield request(8, {"temperature": 1.0, "mirostat": 2})
    penalties = {"repeat_penalty": 1.1, "dry_multiplier": 0.8, "dry_allowed_length": 1}
    yield request(8, {"temperature": 1.0, **penalties})
    yield request(8, {"temperature": 0.0}, num_prompt_logprobs=1)
    yield request(8, {"temperature": 0.0}, wants_embedding=True)
