"""Driving llama-bench and llama-batched-bench, of llama.cpp or of a fork such as ik_llama.cpp."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.frame import Json, objects, run

_CONTEXT_STEP = 256
_ATTEMPTS = 4  # llama-batched-bench's log now and then loses a line
_CACHES = {"float16": "f16", "float32": "f32", "q8": "q8_0"}


@dataclass(frozen=True)
class Build:
    """One build, named after the folder that it was built in."""

    name: str
    bench: str


def builds_of(paths: Sequence[str]) -> list[Build]:
    """The builds of these llama-bench programs, else PATH's, if there is one. Errors: UsageError"""
    found = []
    for path in paths or ["llama-bench"]:
        program = shutil.which(path)
        if program is not None:
            bench = Path(program).resolve()
            inside = bench.parent.name == "bin"
            found.append(Build((bench.parents[1] if inside else bench.parent).name, str(bench)))
        elif paths:
            raise click.UsageError(f"{path} is no program; give the path of a llama-bench")
    return found


def measure(
    build: Build, gguf: Path, threads: int, tokens: int, prompts: Sequence[int] = (),
    batches: Sequence[int] = (), depths: Sequence[int] = (), kv_dtype: str = "",
) -> Json:  # fmt: skip
    """Tokens a second of one build, each once, by names of quantities; its peak memory in GB."""
    common = [build.bench, "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "jsonl"]
    if kv_dtype:
        cache = _CACHES[kv_dtype]
        common += ["-fa", "1", "-ctk", cache, "-ctv", cache]
    runs = [["-p", ",".join(map(str, prompts)) or "0", "-n", str(tokens)]]
    if depths:
        runs.append(["-p", "0", "-n", str(tokens), "-d", ",".join(map(str, depths))])
    found: Json = {"peak memory, GB": 0.0}
    for options in runs:
        said, peak = run([*common, *options])
        found["peak memory, GB"] = max(found["peak memory, GB"], peak / 1e9)
        for row in objects(said):
            depth = row.get("n_depth", 0)
            name = f"prompt of {row['n_prompt']}" if row["n_prompt"] else "decode"
            found[f"{name} after {depth}" if depth else name] = row["samples_ts"][0]
    return found | _batches(build, gguf, threads, tokens, batches)


def _batches(
    build: Build, gguf: Path, threads: int, tokens: int, batches: Sequence[int]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(_ATTEMPTS):
        missing = [count for count in batches if f"{count} at once" not in found]
        program = Path(build.bench).with_name("llama-batched-bench")
        if not missing or not program.is_file():
            break
        room = -(-(2 + tokens) // _CONTEXT_STEP) * _CONTEXT_STEP * max(missing)
        command = [str(program), "-m", str(gguf), "-t", str(threads), "-c", str(room)]
        command += ["-npp", "2", "-ntg", str(tokens), "-npl", ",".join(map(str, missing))]
        said, _ = run([*command, "--output-format", "jsonl"])
        found |= {f"{row['pl']} at once": row["speed_tg"] for row in objects(said)}
    return found
