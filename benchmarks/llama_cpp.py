"""Driving llama.cpp: what its llama-bench and llama-batched-bench say of a GGUF file.

    python -m benchmarks.llama_cpp MODEL.gguf --llama-bench PATH --llama-bench PATH --batch 4

Several builds may be given, of llama.cpp or of a fork such as ik_llama.cpp; each is measured by
itself. llama-batched-bench is looked for beside each llama-bench. Where there is no llama-bench,
llama-cpp-python is driven instead (`benchmarks/llama_python.py`), if it is installed; it comes with
the `bench` extra.
"""

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.process_memory import high_water_bytes
from benchmarks.runs import Json

BATCH_PROMPT = 2  # tokens of each request of a batch, few: its decoding is timed
_CONTEXT_STEP = 256
_ATTEMPTS = 4


@dataclass(frozen=True)
class Sizes:
    """What is measured of either program."""

    threads: int
    tokens: int  # decoded in a run
    prompt_tokens: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()  # requests at once, those over one


@dataclass(frozen=True)
class Build:
    """One build of llama.cpp."""

    name: str
    bench: tuple[str, ...]  # the command
    batched: tuple[str, ...] = ()  # llama-batched-bench's; () where there is none


@dataclass(frozen=True)
class Answer:
    """What a program printed."""

    rows: list[Json]
    first_row_s: float  # from the start of the process
    peak_bytes: int  # the most that was resident, mapped weights too, up to its last row


def find_builds(paths: Sequence[str], with_batches: bool) -> list[Build]:
    """The builds of these llama-bench programs, else of PATH, else llama-cpp-python.

    Errors:  UsageError where there is none, or none that decodes batches
    """
    programs = [_program(path) for path in paths]
    on_path = shutil.which("llama-bench")
    if not programs and on_path is not None:
        programs = [on_path]
    builds = [_build(program) for program in programs]
    if not builds and importlib.util.find_spec("llama_cpp") is not None:
        own = (sys.executable, "-m", "benchmarks.llama_python")
        builds = [Build("llama-cpp-python", own, (*own[:2], f"{own[2]}_batches"))]
    if not builds:
        raise click.UsageError(
            "there is no llama-bench on PATH and no llama-cpp-python; give --llama-bench"
        )
    if with_batches and not any(build.batched for build in builds):
        raise click.UsageError(
            "--batch over 1 takes a llama-batched-bench beside llama-bench, and there is none; "
            "build it, or leave --batch out"
        )
    return builds


def measure(build: Build, gguf: Path, sizes: Sizes) -> Json:
    """Tokens a second of one build, each once, and its peak memory.

    decode of one sequence; prefill by prompt length, with seconds to the first token, which is when
    the whole prompt is read; batch by requests at once, all their tokens together.
    """
    prompts = ",".join(map(str, sizes.prompt_tokens)) or "0"
    command = _bench(build, gguf, sizes.threads, prompts, sizes.tokens)
    answer = run_program(command)
    rates = {(row["n_prompt"], row["n_gen"]): row["samples_ts"][0] for row in answer.rows}
    wanted = [(length, 0) for length in sizes.prompt_tokens] + [(0, sizes.tokens)]
    if set(wanted) - set(rates):
        raise click.ClickException(f"{' '.join(command)}: printed other runs than were asked for")
    prefill = {
        str(length): {"tokens_per_s": rates[length, 0], "first_token_s": length / rates[length, 0]}
        for length in sizes.prompt_tokens
    }
    return {
        "name": build.name,
        "build": answer.rows[0].get("build_commit", ""),
        "instructions": compiled_for(answer.rows[0].get("system_info", "")),
        "decode": rates[0, sizes.tokens],
        "prefill": prefill,
        "batch": _measure_batches(build, gguf, sizes),
        "peak_bytes": answer.peak_bytes,
    }


def measure_load(build: Build, gguf: Path, threads: int) -> float:
    """Seconds from a process's start to its first token.

    Only a token shows that weights are there: files are mapped, and read when they are first used.
    """
    return run_program([*_bench(build, gguf, threads, "0", 1), "--no-warmup"]).first_row_s


def compiled_for(system_info: str) -> str:
    """The vector instructions in what llama.cpp says of itself; "" where it says nothing.

    It says all of a build's, and a build that is not native uses them without asking the CPU.
    """
    flags = re.findall(r"\b((?:AVX|FMA|F16C|NEON|SVE|AMX)\w*) = 1", system_info)
    return ", ".join(flags)


def run_program(command: Sequence[str]) -> Answer:
    """Run a program that prints JSON objects, each from the start of a line; all else is skipped.

    Errors:  ClickException with the program's last line where it failed
    """
    started, first_row_s, peak_bytes = time.perf_counter(), 0.0, 0
    printed: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line.lstrip().startswith("{"):
                first_row_s = first_row_s or time.perf_counter() - started
                peak_bytes = max(peak_bytes, high_water_bytes(process.pid))
        if process.wait():
            errors.seek(0)
            said = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise click.ClickException(f"{' '.join(command)}: {said[-1]}")
    rows = _objects("".join(printed))
    return Answer(rows, first_row_s, peak_bytes)


def _objects(text: str) -> list[Json]:
    """The JSON objects that begin a line of `text`, in a list or not."""
    decoder, found, end = json.JSONDecoder(), list[Json](), 0
    for start in (each.end() - 1 for each in re.finditer(r"^[ \t]*\{", text, re.MULTILINE)):
        if start >= end:
            with contextlib.suppress(json.JSONDecodeError):  # a line of a log
                row, end = decoder.raw_decode(text, start)
                found.append(row)
    return found


def _bench(build: Build, gguf: Path, threads: int, prompts: str, tokens: int) -> list[str]:
    run = ["-m", str(gguf), "-t", str(threads), "-p", prompts, "-n", str(tokens)]
    return [*build.bench, *run, "-r", "1", "-o", "json"]


def _measure_batches(build: Build, gguf: Path, sizes: Sizes) -> dict[str, float]:
    """llama-batched-bench prints through a log that now and then loses a line: such ones again."""
    found: dict[str, float] = {}
    for _ in range(_ATTEMPTS if build.batched else 0):
        missing = [batch for batch in sizes.batches if str(batch) not in found]
        if not missing:
            break
        rows = run_program(_batched(build, gguf, sizes, missing)).rows
        found |= {str(row["pl"]): row["speed_tg"] for row in rows}
    return found


def _batched(build: Build, gguf: Path, sizes: Sizes, batches: list[int]) -> list[str]:
    each = -(-(BATCH_PROMPT + sizes.tokens) // _CONTEXT_STEP) * _CONTEXT_STEP
    run = ["-m", str(gguf), "-t", str(sizes.threads), "-c", str(each * max(batches))]
    run += ["-npp", str(BATCH_PROMPT), "-ntg", str(sizes.tokens)]
    run += ["-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]
    return [*build.batched, *run]


def _program(path: str) -> str:
    found = shutil.which(path)
    if found is None:
        raise click.UsageError(f"{path} is no program; give the path of a llama-bench")
    return found


def _build(program: str) -> Build:
    """Named after the folder that it was built in, which stands above `bin`."""
    path = Path(program).resolve()
    folder = path.parent.parent if path.parent.name == "bin" else path.parent
    batched = path.with_name("llama-batched-bench")
    return Build(folder.name, (str(path),), (str(batched),) if batched.is_file() else ())


@click.command()
@click.argument("gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-bench", "paths", multiple=True, help="From PATH without it; repeatable.")
@click.option("--threads", default=2, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--prompt-tokens", type=int, multiple=True, default=(128,), show_default=True)
@click.option("--batch", "batches", type=click.IntRange(min=2), multiple=True)
def main(
    gguf: Path,
    paths: tuple[str, ...],
    threads: int,
    tokens: int,
    prompt_tokens: tuple[int, ...],
    batches: tuple[int, ...],
) -> None:
    """Measure GGUF once with every build; a line of JSON each."""
    sizes = Sizes(threads, tokens, prompt_tokens, batches)
    for build in find_builds(paths, bool(batches)):
        load_s = measure_load(build, gguf, threads)
        click.echo(json.dumps(measure(build, gguf, sizes) | {"load_s": load_s}))


if __name__ == "__main__":
    main()
