"""hotcold beside llama.cpp, in turn: one request, several at once, prompts, long contexts, memory.

    python -m benchmarks.vs_llama_cpp MODEL.gguf --mode dense --batch 8 --prompt-tokens 512
    python -m benchmarks.vs_llama_cpp MODEL --dtype f16 --dtype q8 --mode exact --mode sign
    python -m benchmarks.vs_llama_cpp MODEL.gguf --depth 4096 --depth 16384 --kv-dtype q8

Both read a GGUF file as it is (`benchmarks.random_gguf` writes one of a known shape). Of any other
MODEL, such as `hotcold make-model` writes, llama.cpp gets a Llama with random weights and as many
bytes in every part. Several `--llama-bench` are several builds, of which each row has the better;
where there is none, hotcold is measured alone.

hotcold stays loaded, so a round takes seconds, and each round's ratio is taken by itself: a machine
whose speed drifts does not bend it. Where both do not fit, `--one-at-a-time` loads one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import click
import ray

from benchmarks import frame
from benchmarks.frame import Json, head, heading, spread, table
from benchmarks.llama_cpp import builds_of
from benchmarks.llama_cpp import measure as measure_theirs
from hotcold.actors.launch import start_local_ray
from hotcold.actors.protocol.messages import MODES, SystemConfig
from hotcold.actors.protocol.options import KV_DTYPES
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.setup.shards import arena_layout
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import batch_report, decode_request
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.gguf.file_names import is_gguf
from hotcold.placement.machine.measure_node import measure_read_bandwidth

_AS_STORED = "as stored"  # of a GGUF file
_FORMATS = {"f16": "f16", "q8": "q8_0", "q4": "q4_0"}  # by hotcold's names: a file's
_PROMPT, _WARM_UP = 16, 8  # tokens
_READ_BYTES, _READ_S = 1 << 29, 0.2
_KEPT = ("bytes_per_token", "gb_per_s", "read_gb_per_s", "per_token_ms")
_COLUMNS = ("format", "mode", "tokens/s", "llama.cpp", "hotcold", "ratio (least to most)",
            "GB a token", "of a plain read")  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is measured of either program."""

    threads: int
    tokens: int
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    depths: tuple[int, ...]
    kv_dtype: str

    @property
    def positions(self) -> int:
        """Of the longest request."""
        longest = max((*self.prompts, *self.depths, _PROMPT))
        return max(longest + self.tokens + 1, MATRIX_TOKENS + 1)


@dataclass(frozen=True)
class Prepared:
    """A system that can be started: one mode of a model in one format."""

    system: SystemConfig
    config: ModelConfig

    @classmethod
    def of(cls, model: Path, dtype: str, mode: str, sizes: Sizes) -> Prepared:
        """Check model and options. Errors: HotcoldError."""
        batch = max(sizes.batches, default=1)
        each = -(-(_PROMPT + sizes.tokens + 1) // 64) * 64
        options = SystemOptions(
            mode=mode, num_threads=sizes.threads, max_batch=batch, speculate="off",
            weight_dtype=None if dtype in ("f16", _AS_STORED) else dtype,
            kv_dtype=sizes.kv_dtype or None, context_length=sizes.positions,
            kv_positions=max(sizes.positions, batch * each),
        )  # fmt: skip
        return cls(*prepare_system(model, options))


@contextmanager
def loaded(prepared: Sequence[Prepared]) -> Iterator[list[System]]:
    """All these systems, started and warm, in a Ray of their own."""
    if not prepared:
        yield []
        return
    arenas = sum(arena_layout(each.system, each.config).num_bytes for each in prepared)
    start_local_ray(sum(each.system.num_threads for each in prepared), arenas)
    try:
        with ExitStack() as stack:
            running = [stack.enter_context(System.start(each.system)) for each in prepared]
            for system, each in zip(running, prepared, strict=True):  # what long prompts need, too
                system.complete(decode_request(each.config, MATRIX_TOKENS, 0))
                system.complete(decode_request(each.config, _PROMPT, _WARM_UP))
            yield running
    finally:
        ray.shutdown()


def measure(running: System, own: Prepared, sizes: Sizes, with_prompts: bool) -> Json:
    """One round of a running system: as `llama_cpp.measure`, and what bounds its decoding.

    A prompt is computed whole in every mode, so one mode's will do.
    """

    def ask(prompt: int, tokens: int, batch: int = 1) -> Json:
        asked = [decode_request(own.config, prompt, tokens, number) for number in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            results = list(pool.map(running.complete, asked))
        read = measure_read_bandwidth(sizes.threads, _READ_BYTES, _READ_S) if batch == 1 else 1.0
        return batch_report(own.system, own.config, [results], read)

    found = ask(_PROMPT, sizes.tokens)
    rates: Json = {"decode": found["tokens_per_s"]}
    rates |= {f"{n} at once": ask(2, sizes.tokens, n)["tokens_per_s"] for n in sizes.batches}
    for depth in sizes.depths:
        rates[f"decode after {depth}"] = ask(depth, sizes.tokens)["tokens_per_s"]
    for length in sizes.prompts if with_prompts else ():
        result = running.complete(decode_request(own.config, length, 0))
        rates[f"prompt of {length}"] = result.prefill_tokens_per_s
    rates["peak memory, GB"] = frame.peak_bytes(running.call("processes").values()) / 1e9
    return rates | {name: found[name] for name in _KEPT}


def rounds_of(
    prepared: dict[str, Prepared], theirs: Mapping[str, Callable[[], Json]], sizes: Sizes,
    count: int, apart: bool,
) -> Iterator[Json]:  # fmt: skip
    """Each round by modes and builds; `theirs` are called anew in each."""
    with loaded([] if apart else list(prepared.values())) as running:
        for _ in range(count):
            found = {name: run() for name, run in theirs.items()}
            for number, (mode, own) in enumerate(prepared.items()):
                one = loaded([own]) if apart else nullcontext([running[number]])
                with one as (system,):
                    found[mode] = measure(system, own, sizes, number == 0)
            yield found


def rows_of(modes: Sequence[str], builds: Sequence[str], rounds: list[Json]) -> Iterator[Json]:
    """A row for each mode and quantity; a ratio over 1 is hotcold's favour."""
    for mode in modes:
        middle = sorted((one[mode] for one in rounds), key=lambda one: float(one["decode"]))
        for name in [name for name in rounds[0][mode] if " " in name or name == "decode"]:
            is_memory = name.startswith("peak")
            better = min if is_memory else max
            known = [b for b in builds if all(name in one[b] for one in rounds)]
            best = better(known, key=lambda b: median(o[b][name] for o in rounds), default="")
            ours = [one[mode][name] for one in rounds]
            theirs = [one[best][name] for one in rounds] if best else []
            pairs = list(zip(ours, theirs, strict=False))
            ratios = [b / a if is_memory else a / b for a, b in pairs]
            row: Json = {"mode": mode, "what": name, "build": best, "llama_cpp": theirs,
                         "hotcold": ours, "ratios": ratios}  # fmt: skip
            yield row | (middle[len(middle) // 2] if name == "decode" else {})


def cells_of(row: Json) -> list[str | None]:
    """A row of the table: medians."""
    has, is_decode = bool(row["ratios"]), "gb_per_s" in row
    return [
        row["format"], f"`{row['mode']}`", row["what"],
        f"{median(row['llama_cpp']):.2f} ({row['build']})" if has else None,
        f"{median(row['hotcold']):.2f}", spread(row["ratios"]) if has else None,
        f"{row['bytes_per_token'] / 1e9:.2f}" if is_decode else None,
        f"{row['gb_per_s'] / row['read_gb_per_s']:.0%}" if is_decode else None,
    ]  # fmt: skip


@frame.program
@click.argument("model", type=frame.EXISTING)
@click.option("--llama-bench", "paths", multiple=True, help="Repeatable; PATH's without it.")
@click.option("--dtype", "dtypes", type=click.Choice([*_FORMATS]), multiple=True,
              help="Not of a GGUF file; f16 without it.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=["exact"])
@click.option("--batch", "batches", type=click.IntRange(1, 32), multiple=True)
@click.option("--prompt-tokens", "prompts", type=int, multiple=True, default=[128])
@click.option("--depth", "depths", type=int, multiple=True, help="Tokens before those decoded.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="float16")
@click.option("--tokens", type=click.IntRange(2), default=48, help="Decoded in a run.")
@click.option("--threads", type=click.IntRange(1), default=2)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--one-at-a-time", "apart", is_flag=True, help="Have one program loaded at a time.")
def main(
    model: Path, paths: tuple[str, ...], dtypes: tuple[str, ...], modes: tuple[str, ...],
    batches: tuple[int, ...], prompts: tuple[int, ...], depths: tuple[int, ...], kv_dtype: str,
    tokens: int, threads: int, rounds: int, apart: bool,
) -> tuple[Json, str]:  # fmt: skip
    """Measure MODEL in every format and mode; decoding, batches, prompts, depths, memory."""
    if is_gguf(model) and dtypes:
        raise click.UsageError(f"{model} is a GGUF file, compared as it is: leave out --dtype")
    several = tuple(dict.fromkeys(count for count in batches if count > 1))
    sizes = Sizes(threads, tokens, prompts, several, depths, kv_dtype if depths else "")
    builds, modes = builds_of(paths), tuple(dict.fromkeys(modes))
    report: Json = head(model, threads) | {"rounds": rounds, "rows": []}
    for dtype in [_AS_STORED] if is_gguf(model) else dtypes or ["f16"]:
        prepared = {mode: Prepared.of(model, dtype, mode, sizes) for mode in modes}
        with tempfile.TemporaryDirectory() as scratch:
            gguf = model
            if builds and dtype != _AS_STORED:
                from benchmarks.random_gguf import write_like

                gguf = Path(scratch) / "model.gguf"
                write_like(gguf, prepared[modes[0]].config, _FORMATS[dtype])
            given = gguf, threads, tokens, prompts, several, depths, sizes.kv_dtype
            theirs = {one.name: partial(measure_theirs, one, *given) for one in builds}
            measured = []
            for found in rounds_of(prepared, theirs, sizes, rounds, apart):
                measured.append(found)
                decodes = ", ".join(f"{name} {one['decode']:.2f}" for name, one in found.items())
                frame.progress(f"{dtype}, round {len(measured)}: decode {decodes}")
        names = [one.name for one in builds]
        report["rows"] += [{"format": dtype, **row} for row in rows_of(modes, names, measured)]
    how = "one program loaded at a time" if apart else "in turn"
    lines = map(cells_of, report["rows"])
    return report, heading(report, f"{rounds} rounds, {how}; medians") + table(_COLUMNS, lines)


if __name__ == "__main__":
    main()
