"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL.gguf --cpu-memory 3.5GiB --cpu-memory 2.6GiB --mode dense
    python -m benchmarks.storage MODEL --resident 0.5 --text FILE
    python -m benchmarks.storage MODEL --cpu-memory 3.2GiB --load 1200

Each row is a run of its own, once all is out of the page cache, in a memory cgroup (version 1, by
root; else nothing is limited) a little larger than `--cpu-memory`, so that a promise that is broken
shows as a peak: resident memory and page cache of all processes, Ray's included. With `--load` the
run ends with so many seconds of answers to prompts of 200 to 400 tokens, three at once.
`--resident` keeps a share of the neurons instead, however small the model is. Speeds are means over
`--answers`, each to a prompt of its own, of `--text` where it is given (what experts are chosen
depends on it); "planned" is what `hotcold plan` says. llama.cpp is run where there is a
llama-bench, with MODEL or `--gguf`.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import click

from benchmarks import frame
from benchmarks.frame import Json, hotcold, run, table
from benchmarks.llama_cpp import builds_of
from benchmarks.load import Load, requests_of
from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import MODES, GenerateRequest, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.options import DTYPES
from hotcold.actors.setup.preflight import SystemOptions, in_memory, prepare_system, read_model
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.jobs.bench.decode import decode_request
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.options import BYTES
from hotcold.jobs.support.text_file import read_text_ids
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.mapped_file import forget_pages
from hotcold.model.sampling import SamplingParams
from hotcold.placement.machine.measure_disk import measure_disk

ROOM = 1.25  # of the cgroup beside what was promised
_PROMPT, _AT_ONCE = 16, 3
_COLUMNS = ("in memory", "program", "tokens/s", "of in memory", "of llama.cpp",
            "planned", "prompt tokens/s", "MB read a token", "found", "waited",
            "disk alone, MB/s", "peak, GiB", "of the promise")  # fmt: skip


def on_storage(system: SystemConfig, resident: float) -> SystemConfig:
    """The system with that share of its neurons in memory, and all of them in a bundle file."""
    path = Path(system.model_path)
    system, config = in_memory(system, read_model(path))
    if not has_bundles(path, config):
        pack_model(path, config)
    kept = int(resident * config.num_neurons)
    file = bundle_path(path, BundleGeometry.of(config))
    return replace(system, storage=NeuronStorage(str(file), kept, kept))


def run_limited(
    command: Sequence[str], memory_bytes: int, files: Sequence[Path]
) -> tuple[str, int]:
    """What a command prints, in a memory cgroup of its own, and the most memory that it had.

    0 is no limit, and a peak that is not known. `files` are not in the page cache when it begins.
    """
    for file in files:
        forget_pages(file)
    group = Path(f"/sys/fs/cgroup/memory/hotcold-{os.getpid()}-{time.monotonic_ns()}")
    try:
        group.mkdir()
    except OSError:  # not root, or version 2
        return run(command)[0], 0
    try:
        if memory_bytes:
            (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
        said, _ = run(command, preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))
        return said, int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        while (group / "cgroup.procs").read_text():  # what was started in it may still be ending
            time.sleep(0.1)
        group.rmdir()


def prompts_of(text: str, path: Path, config: ModelConfig, count: int) -> list[list[int]]:
    """`count` prompts of 16 tokens: of places spread over a text, else ids over the vocabulary."""
    if not text:
        asked = [decode_request(config, _PROMPT, 0, number) for number in range(count)]
        return [list(one.prompt_ids or ()) for one in asked]
    ids = read_text_ids(Path(text), Prompts(path, config, config.max_positions)).ids
    if ids.size < count * _PROMPT:
        raise click.ClickException(f"{text}: has {ids.size} tokens; give {count * _PROMPT} or more")
    return [ids[at : at + _PROMPT].tolist() for at in range(0, ids.size, ids.size // count)]


def run_here(path: Path, given: Json) -> Json:
    """One row's run, in this process."""
    options = SystemOptions(max_batch=_AT_ONCE, speculate="off", **given["options"])
    system, config = prepare_system(path, options)
    if given["resident"] < 1:
        system = on_storage(replace(system, plan_path=""), given["resident"])
    prompts, results = prompts_of(given["text"], path, config, 1 + given["answers"]), []
    with running_system(system) as running:
        for seed, ids in enumerate(prompts):  # drawn: the likeliest tokens soon repeat themselves
            sampling = SamplingParams(
                max_tokens=given["tokens"] + 1, temperature=1.0, seed=seed, ignore_eos=True
            )
            asked = GenerateRequest(sampling, prompt_ids=ids, use_cache=False)
            results.append(running.complete(asked))
        report: Json = {"tokens_per_s": given["tokens"] / mean(r.decode_s for r in results[1:])}
        told = [result.reads for result in results[1:]]
        names = set.intersection(*map(set, told))  # an answer that read nothing ahead tells less
        report["reads"] = {name: mean(each[name] for each in told) for name in sorted(names)}
        if given["prompt"]:
            running.complete(decode_request(config, given["prompt"], 0, 3))
            long = running.complete(decode_request(config, given["prompt"], 0, 4))
            report["prompt_tokens_per_s"] = long.prefill_tokens_per_s
        if given["load"]:
            requests = requests_of(8, given["options"]["context_length"], config.vocab_size)
            load = Load(running, requests[-_AT_ONCE:])
            load.start()
            time.sleep(given["load"])
            load.stop()
            report |= {"answers": load.num_right, "wrong": load.wrong}
    if system.storage is not None:
        (report["disk_bytes_per_s"],) = measure_disk(Path(system.storage.path), [given["read"]])
    return report


@frame.program
@click.argument("model", type=frame.EXISTING)
@click.option("--cpu-memory", "sizes", type=BYTES, multiple=True)
@click.option("--resident", "shares", type=click.FloatRange(0, 1), multiple=True,
              help="Share of the neurons in memory.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=["sign"])
@click.option("--dtype", type=click.Choice([*DTYPES]), help="As of `hotcold generate`.")
@click.option("--tokens", default=64, help="Of an answer.")
@click.option("--answers", default=4, help="After one that fills the slots.")
@click.option("--text", default="", help="To take prompts of.")
@click.option("--prompt", default=512, help="A prompt to be measured; 0: none.")
@click.option("--context", default=1024)
@click.option("--repeat", default=1)
@click.option("--load", "load_s", default=0.0, help="Then a mixed load of so many seconds.")
@click.option("--threads", default=2)
@click.option("--read-bytes", type=BYTES, default="16KiB", help="Of reads of the disk alone.")
@click.option("--all/--no-all", "with_all", default=True, help="Also with all in memory.")
@click.option("--llama-bench", "llama", multiple=True, help="PATH's without it.")
@click.option("--llama-tokens", type=int, help="As many as --tokens without it.")
@click.option("--gguf", type=frame.EXISTING, help="What llama.cpp reads.")
@click.option("--run-here", "here", help="Of this program alone: a run, as JSON.", hidden=True)
def main(
    model: Path, sizes: Sequence[int], shares: Sequence[float], modes: Sequence[str],
    dtype: str | None, tokens: int, answers: int, text: str, prompt: int, context: int,
    repeat: int, load_s: float, threads: int, read_bytes: int,
    with_all: bool, llama: Sequence[str], llama_tokens: int | None,
    gguf: Path | None, here: str | None,
) -> tuple[Json, str]:  # fmt: skip
    """Measure MODEL with all in memory, and with less of it."""
    if here:
        return run_here(model, json.loads(here)), ""
    if not (sizes or shares):
        raise click.UsageError("give --cpu-memory or --resident")
    files = [model] if model.is_file() else [one for one in model.rglob("*") if one.is_file()]
    their_file = gguf or (model if is_gguf(model) else None)
    builds = builds_of(llama)[:1] if their_file else []
    report: Json = frame.head(model, threads) | {"model": model.name, "tokens": tokens, "rows": []}
    cases: list[tuple[int, float]] = [(0, 1.0)] * with_all
    cases += [*((size, 1.0) for size in sizes), *((0, share) for share in shares)]

    def ours(case: tuple[int, float], mode: str) -> Json:
        size, resident = case
        options: Json = {"mode": mode, "weight_dtype": dtype, "num_threads": threads,
                         "context_length": context, "cpu_memory_bytes": size or None}  # fmt: skip
        given = {"options": options, "resident": resident, "text": text,
                 "answers": answers, "tokens": tokens, "prompt": prompt, "read": read_bytes,
                 "load": load_s if size else 0}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.storage", str(model), "--json"]
        command += ["--run-here", json.dumps(given)]
        said, peak = run_limited(command, int(ROOM * size), files)
        return json.loads(said.splitlines()[-1]) | {"peak_bytes": peak}

    def theirs(case: tuple[int, float]) -> Json:
        command = [builds[0].bench, "-m", str(their_file), "-p", "0", "-r", "1", "-o", "jsonl"]
        command += ["-n", str(llama_tokens or tokens), "-t", str(threads)]
        command += ["--repack", "0"] if case[0] else []  # repacked weights are not mapped
        said, peak = run_limited(command, case[0], [their_file or model])
        return {"tokens_per_s": frame.objects(said)[-1]["samples_ts"][0], "peak_bytes": peak}

    def add(case: tuple[int, float], name: str, runs: list[Json], **more: Any) -> None:
        row = {"cpu_memory": case[0], "resident": case[1]}
        report["rows"].append(row | {"program": name, "runs": runs} | more)
        frame.progress(f"{row} {name}: {runs}")

    for case in cases:
        for mode in modes:
            planned = None
            if case[0]:
                asked = ["plan", str(model), "--mode", mode, "--cpu-memory", str(case[0])]
                asked += ["--threads", str(threads), "--context", str(context)]
                asked += ["--dtype", dtype] if dtype else []
                told = hotcold(*asked)
                planned = told["storage"][0]["tokens_per_s"] if told.get("storage") else None
            runs = [ours(case, mode) for _ in range(repeat)]
            add(case, f"hotcold `{mode}`", runs, planned=planned)
        if builds and case[1] == 1:
            add(case, "llama.cpp", [theirs(case) for _ in range(repeat)])
    text = frame.heading(report, model.name, f"{tokens} tokens an answer")
    return report, text + table(_COLUMNS, [_line(row, report["rows"]) for row in report["rows"]])


def _line(row: Json, rows: list[Json]) -> list[str | None]:
    """A row of the table: medians; the greatest peak; empty where a figure is not known."""

    def middle(find: Any, spec: str) -> str | None:
        found = [value for value in map(find, row["runs"]) if value]
        return format(median(found), spec) if found else None

    def reads(name: str, spec: str, unit: float = 1.0) -> str | None:
        return middle(lambda run: run.get("reads", {}).get(name, 0.0) / unit, spec)

    def beside(**case: Any) -> str | None:
        """Its speed as a share of another row's."""
        others = [one for one in rows if one is not row and case.items() <= one.items()]
        return f"{_speed(row) / _speed(others[0]):.2f}" if others else None

    size = row["cpu_memory"]
    kept = f"{size / (1 << 30):.2f} GiB" if size else f"{row['resident']:.0%}"
    peak = max(run["peak_bytes"] for run in row["runs"])
    same = {name: row[name] for name in ("cpu_memory", "resident")}
    return [
        kept, row["program"], f"{_speed(row):.2f}",
        beside(program=row["program"], cpu_memory=0, resident=1.0),
        beside(program="llama.cpp", **same),
        f"{row['planned']:.2f}" if row.get("planned") else None,
        middle(lambda run: run.get("prompt_tokens_per_s"), ".1f"), reads("bytes_read", ".1f", 1e6),
        reads("hit_rate", ".1%"), reads("wait_share", ".1%"),
        middle(lambda run: run.get("disk_bytes_per_s", 0) / 1e6, ".0f"),
        f"{peak / (1 << 30):.2f}" if peak else None,
        f"{peak / size:.3f}" if size and peak else None,
    ]  # fmt: skip


def _speed(row: Json) -> float:
    return median(run["tokens_per_s"] for run in row["runs"])


if __name__ == "__main__":
    main()
