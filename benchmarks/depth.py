"""Decoding after thousands of tokens, and long prompts, of hotcold beside llama.cpp, in turn.

    python -m benchmarks.depth MODEL --llama-bench PATH --depth 4096 --depth 16384 \\
        --kv-dtype float16 --kv-dtype q8 --prompt-tokens 4096 --out benchmarks/results/depth

MODEL is a GGUF file, or float16 weights such as `hotcold make-model` writes, which llama.cpp gets
converted. A depth is reached by a prompt of that length. llama.cpp runs as `llama-bench -d`, with
flash attention, and with a q8_0 cache where hotcold has q8. Each round's ratio is taken by itself.
The ceiling is what memory allows: weights and cached keys and values read once a token, at the
speed of a plain read. `--no-llama-cpp` measures hotcold alone.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.hotcold_side import AS_STORED, DTYPES, Prepared, instructions, loaded
from benchmarks.llama_cpp import Build, find_builds, run_program
from benchmarks.runs import Json, spread, table_option, where_and_when, write_report
from benchmarks.vs_llama_cpp import gguf_path
from hotcold.actors.protocol.messages import MODES
from hotcold.actors.protocol.options import KV_DTYPES
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import decode_report, decode_request
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.weights.sizes import kv_row_bytes
from hotcold.placement.machine.measure_node import measure_read_bandwidth

_THEIR_CACHES = {"float16": "f16", "float32": "f32", "q8": "q8_0"}
_READ_BYTES, _READ_S = 1 << 29, 0.5


def cache_bytes(config: ModelConfig, depth: int, kv_dtype: str) -> int:
    """Bytes of keys and values that a token at `depth` reads in all layers."""
    seen = sum(
        min(depth, layer.attention.window) if layer.attention.window else depth
        for layer in config.layers
    )
    return 2 * seen * config.num_kv_heads * kv_row_bytes(config.head_dim, kv_dtype)


def prepared(
    model: Path, dtype: str, mode: str, threads: int, positions: int, kv_dtype: str
) -> Prepared:
    """A system for one request of so many positions. Errors: HotcoldError."""
    options = SystemOptions(
        mode=mode,
        num_threads=threads,
        max_batch=1,
        context_length=positions,
        kv_dtype=kv_dtype,
        weight_dtype=None if dtype in ("f16", AS_STORED) else dtype,
    )
    return Prepared(mode, *prepare_system(model, options))


def measure(
    running: System, own: Prepared, depths: Sequence[int], prompts: Sequence[int], tokens: int,
    number: int,
) -> Json:  # fmt: skip
    """One round: tokens/s by depth, each with its ceiling, and of prompts by their length."""
    system, config = own.system, own.config
    found: Json = {"depths": {}, "prompts": {}}
    for depth in depths:
        result = running.complete(decode_request(config, depth, tokens, number))
        read = measure_read_bandwidth(system.num_threads, _READ_BYTES, _READ_S)
        report = decode_report(system, config, [result], read)
        cached = cache_bytes(config, depth + tokens // 2, system.kv_dtype)
        num_bytes = report["bytes_per_token"] + cached
        found["depths"][str(depth)] = {
            "tokens_per_s": report["tokens_per_s"],
            "weight_bytes": report["bytes_per_token"],
            "cache_bytes": cached,
            "read_gb_per_s": read,
            "ceiling_tokens_per_s": read * 1e9 / num_bytes,
            "prefill_tokens_per_s": result.prefill_tokens_per_s,
        }
    for length in prompts:
        result = running.complete(decode_request(config, length, 0, 1000 + number))
        found["prompts"][str(length)] = result.prefill_tokens_per_s
    return found


def measure_llama_cpp(
    build: Build, gguf: Path, threads: int, depths: Sequence[int], prompts: Sequence[int],
    tokens: int, kv_dtype: str,
) -> Json:  # fmt: skip
    """The same of one build: tokens/s by depth, and of prompts by their length."""
    cache = _THEIR_CACHES[kv_dtype]
    common = [*build.bench, "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "jsonl"]
    common += ["-fa", "1", "-ctk", cache, "-ctv", cache]
    rows: list[Json] = []
    if depths:
        run = ["-p", "0", "-n", str(tokens), "-d", ",".join(map(str, depths))]
        rows += run_program([*common, *run]).rows
    if prompts:
        rows += run_program([*common, "-p", ",".join(map(str, prompts)), "-n", "0"]).rows
    rates = {
        (row["n_prompt"], row["n_gen"], row.get("n_depth", 0)): row["samples_ts"][0] for row in rows
    }
    wanted = [(0, tokens, depth) for depth in depths] + [(length, 0, 0) for length in prompts]
    if set(wanted) - set(rates):
        raise click.ClickException(f"{build.name} printed other runs than were asked for")
    return {
        "name": build.name,
        "depths": {str(depth): rates[0, tokens, depth] for depth in depths},
        "prompts": {str(length): rates[length, 0, 0] for length in prompts},
    }


def table_of(report: Json) -> str:
    """The report as a table: medians, and the ratios of each round."""
    lines = [
        f"{report['shape']}; mode {report['mode']}; {report['machine']}; {report['date']}",
        "",
        "| KV cache | | hotcold | of the ceiling | llama.cpp | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kv_dtype, rounds in report["kv_dtypes"].items():
        for kind, unit in (("depths", "decode at depth"), ("prompts", "prompt of")):
            for size in rounds[0]["hotcold"][kind]:
                lines.append(_line(kv_dtype, rounds, kind, f"{unit} {size}", size))
    return "\n".join(lines) + "\n"


def _line(kv_dtype: str, rounds: list[Json], kind: str, what: str, size: str) -> str:
    ours = [each["hotcold"][kind][size] for each in rounds]
    rates = [each["tokens_per_s"] for each in ours] if kind == "depths" else ours
    share = "—"
    if kind == "depths":
        share = spread([each["tokens_per_s"] / each["ceiling_tokens_per_s"] for each in ours])
    theirs = [[build[kind][size] for build in each["llama_cpp"]] for each in rounds]
    if not theirs[0]:
        return f"| {kv_dtype} | {what} | {spread(rates)} | {share} | — | — |"
    best = [max(each) for each in theirs]
    ratios = [own / other for own, other in zip(rates, best, strict=True)]
    return (
        f"| {kv_dtype} | {what} | {spread(rates)} | {share} | {spread(best)} | {spread(ratios)} |"
    )


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-bench", "paths", multiple=True, help="llama.cpp's llama-bench; from PATH "
              "without it. May be given several times.")  # fmt: skip
@click.option("--llama-cpp/--no-llama-cpp", "with_theirs", default=True, show_default=True)
@click.option("--depth", "depths", type=click.IntRange(min=1), multiple=True,
              default=(4096,), show_default=True, help="Tokens before those that are decoded; "
              "repeatable.")  # fmt: skip
@click.option("--prompt-tokens", "prompts", type=click.IntRange(min=2), multiple=True,
              help="Also time prompts of this length; repeatable.")  # fmt: skip
@click.option("--kv-dtype", "kv_dtypes", type=click.Choice(KV_DTYPES), multiple=True,
              default=("float16", "q8"), show_default=True, help="Repeatable.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="f16", show_default=True,
              help="Format of weights, not for a GGUF file.")  # fmt: skip
@click.option("--mode", type=click.Choice(MODES), default="dense", show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=32, show_default=True,
              help="Tokens decoded a run.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--gguf-folder", type=click.Path(path_type=Path), help="Keep the converted weights "
              "here; those that are there are used.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    model: Path,
    paths: tuple[str, ...],
    with_theirs: bool,
    depths: tuple[int, ...],
    prompts: tuple[int, ...],
    kv_dtypes: tuple[str, ...],
    dtype: str,
    mode: str,
    tokens: int,
    threads: int,
    rounds: int,
    gguf_folder: Path | None,
    out: Path | None,
) -> None:
    """Measure MODEL at every depth with every KV cache."""
    builds = find_builds(paths, False) if with_theirs else []
    weights = AS_STORED if is_gguf(model) else dtype
    positions = max([depth + tokens + 1 for depth in depths] + [length + 1 for length in prompts])
    found: dict[str, list[Json]] = {}
    try:
        about = where_and_when(model, threads)
        systems = {
            kv_dtype: prepared(model, weights, mode, threads, positions, kv_dtype)
            for kv_dtype in kv_dtypes
        }
        with gguf_path(model, weights, gguf_folder) as gguf:
            if builds and not gguf.exists():
                from benchmarks.llama_gguf import write_gguf

                write_gguf(model, gguf, weights)
            for kv_dtype, own in systems.items():
                with loaded([own]) as (running,):
                    found[kv_dtype] = []
                    for number in range(rounds):
                        theirs = [
                            measure_llama_cpp(
                                each, gguf, threads, depths, prompts, tokens, kv_dtype
                            )
                            for each in builds
                        ]
                        ours = measure(running, own, depths, prompts, tokens, number)
                        found[kv_dtype].append({"llama_cpp": theirs, "hotcold": ours})
                        click.echo(f"{kv_dtype}, round {number + 1}: {ours}", err=True)
    except HotcoldError as error:
        raise click.ClickException(str(error)) from None
    report = {**about, "instructions": instructions(), "mode": mode, "kv_dtypes": found}
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
