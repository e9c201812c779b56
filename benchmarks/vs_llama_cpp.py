"""hotcold beside llama.cpp: the same weights, the same cores, in turn, A B C A B C.

    python -m benchmarks.vs_llama_cpp MODEL --llama-bench PATH --mode exact --mode sign \\
        --out benchmarks/results/NAME

MODEL is a Llama checkpoint in float16, such as `hotcold make-model --shape llama-7b --layers 8`
writes; its predictors, for the modes that take them, lie beside it. `llama-bench` is taken from
PATH unless given; `gguf` comes with the `bench` extra. The ratio of each round is taken by itself,
so that a machine whose speed drifts does not bend it.
"""

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import ray

from actors.launch import start_local_ray
from actors.messages import MODES, PREDICTED_MODES
from actors.preflight import SystemOptions, prepare_system
from actors.shards import arena_layout
from actors.system import System
from jobs.bench_decode import decode_report, decode_request
from model.config import ModelConfig
from placement.bandwidth import measure_read_bandwidth
from placement.sysfs import read_cpu

Json = dict[str, Any]
_PROMPT = 16  # tokens before those that are decoded
_READ_BYTES, _READ_S = 1 << 29, 0.2
_RECALL_WINDOW = 128  # tokens: bos and what the model says after it


def hotcold(*arguments: str) -> Json:
    """Run a command of hotcold with --json and return its answer.

    Errors:  ClickException with the command's own last line where it failed
    """
    command = [sys.executable, "-m", "jobs.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise click.ClickException(f"hotcold {' '.join(arguments)}: {said[-1]}")
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def where_and_when(model: Path, threads: int) -> Json:
    """What every report says first: machine, date, shape, batch."""
    config = ModelConfig.from_directory(model)
    return {
        "machine": f"{read_cpu().name}, {threads} threads, Linux {platform.machine()}",
        "date": date.today().isoformat(),
        "shape": shape_text(config),
        "batch": 1,
    }


def shape_text(config: ModelConfig) -> str:
    """A model's sizes in a line."""
    return (
        f"{config.num_layers} layers of d {config.hidden_size}, FFN {config.ffn_size}, "
        f"vocabulary {config.vocab_size}, {config.dtype}"
    )


def write_report(report: Json, table: str, out: Path | None) -> None:
    """Print the table; with `out` write OUT.json and OUT.md too."""
    click.echo(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_name(f"{out.name}.json").write_text(json.dumps(report, indent=1) + "\n")
        out.with_name(f"{out.name}.md").write_text(table)


def table_option(table: Callable[[Json], str]) -> Callable[[Any], Any]:
    """Add `--table-of REPORT.json`: print the table of a report that was written before."""

    def show(context: click.Context, _: click.Parameter, file: Path | None) -> None:
        if file is not None:
            click.echo(table(json.loads(file.read_text())), nl=False)
            context.exit()

    return click.option(
        "--table-of",
        type=click.Path(exists=True, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Measure nothing: print the table of this report, OUT.json of an earlier run.",
    )


def spread(values: list[float]) -> str:
    """The median of ratios, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table_of(report: Json) -> str:
    """The report as Markdown: a row a mode for decode, one for prefill, and notes below."""
    lines = [
        f"{report['shape']}; batch 1; {report['machine']}; {report['date']}; "
        f"{len(report['runs'])} rounds in turn",
        "",
        "| | llama.cpp F16, tokens/s | hotcold f16, tokens/s | ratio (least to most) | gates "
        "computed | up and down computed | GB a token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode in report["modes"]:
        lines.append(_decode_row(report, mode))
    theirs = [run["llama_cpp"]["prefill"] for run in report["runs"]]
    ours = [run["hotcold"]["prefill"] for run in report["runs"]]
    name = f"prefill of {report['prompt_tokens']} tokens"
    lines += [f"| {name} | {_speeds(theirs, ours)} | | | |", ""]
    lines += [_note(report, mode) for mode in report["modes"]]
    return "\n".join(lines) + "\n"


def _decode_row(report: Json, mode: str) -> str:
    theirs = [run["llama_cpp"]["decode"] for run in report["runs"]]
    ours = [run["hotcold"]["modes"][mode]["tokens_per_s"] for run in report["runs"]]
    middle = _middle(report, mode)
    return (
        f"| decode of {report['tokens']} tokens, `{mode}` | {_speeds(theirs, ours)} | "
        f"{middle['gates_computed']:.1%} | {middle['density']:.1%} | "
        f"{middle['bytes_per_token'] / 1e9:.2f} |"
    )


def _speeds(theirs: list[float], ours: list[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median(theirs):.2f} | {median(ours):.2f} | {spread(ratios)}"


def _middle(report: Json, mode: str) -> Json:
    """The round of middle speed."""
    runs: list[Json] = [run["hotcold"]["modes"][mode] for run in report["runs"]]
    return sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]


def _note(report: Json, mode: str) -> str:
    middle = _middle(report, mode)
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in middle["per_token_ms"].items())
    text = (
        f"- `{mode}`: {middle['gb_per_s']:.1f} GB/s of {middle['read_gb_per_s']:.1f} that a plain "
        f"read got; milliseconds a token: {parts}."
    )
    found = report["recall"].get(mode)
    if found is None:
        return text
    known = [share for share in found["by_layer"] if share is not None]
    if not known:
        return f"{text} No neuron fired on {found['tokens']} tokens, so recall is not known."
    return (
        f"{text} Of the neurons that fire it computes {min(known):.2%} in the least layer, "
        f"{mean(known):.2%} in the mean of all ({found['tokens']} tokens that the model wrote "
        f"greedily, {found['distinct_tokens']} distinct)."
    )


def _check_predictors(model: Path, modes: tuple[str, ...]) -> None:
    from predictors.predictor_file import predictors_path

    for mode in modes:
        path = predictors_path(model, mode)
        if mode in PREDICTED_MODES and not path.is_file():
            raise click.UsageError(
                f"{path}: there is no such file; make it with `hotcold train-predictors {model} "
                f"--kind {mode}`"
            )


def _llama_cpp(program: str, weights: Path, threads: int, tokens: int, prompt_tokens: int) -> Json:
    command = [program, "-m", str(weights), "-t", str(threads), "-r", "1", "-o", "json"]
    command += ["-p", str(prompt_tokens), "-n", str(tokens)]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rates = {("decode" if row["n_gen"] else "prefill"): median(row["samples_ts"]) for row in rows}
    return rates | {"build": rows[0].get("build_commit", "")}


@contextmanager
def _loaded(
    model: Path, threads: int, modes: tuple[str, ...], prompt_tokens: int
) -> Iterator[Callable[[int], Json]]:
    """A system for each mode, all loaded; gives what measures them one after another.

    Loaded all the time, so that a round takes seconds and its runs see the same machine.
    """
    options = SystemOptions(num_threads=threads)
    prepared = {mode: prepare_system(model, replace(options, mode=mode)) for mode in modes}
    arenas = sum(arena_layout(*found).num_bytes for found in prepared.values())
    start_local_ray(len(modes) * threads, arenas)
    with ExitStack() as stack:
        running = {
            mode: stack.enter_context(System.start(system))
            for mode, (system, _) in prepared.items()
        }

        def measure(tokens: int) -> Json:
            found = {}
            for mode, (system, config) in prepared.items():
                results = [running[mode].complete(decode_request(config, _PROMPT, tokens))]
                read_gb_per_s = measure_read_bandwidth(threads, _READ_BYTES, _READ_S)
                found[mode] = decode_report(system, config, results, read_gb_per_s)
            request = decode_request(prepared[modes[0]][1], prompt_tokens, 0)
            prefill = running[modes[0]].complete(request).prefill_tokens_per_s
            return {"modes": found, "prefill": prefill}

        measure(8)  # warms up
        yield measure


def _recall(model: Path, threads: int, modes: tuple[str, ...], scratch: Path) -> Json:
    """Of each predicted mode, the share of firing neurons that it lists, on the model's words."""
    predicted = [mode for mode in modes if mode in PREDICTED_MODES]
    if not predicted:
        return {}
    first = ModelConfig.from_directory(model).bos_token_id or 0
    wanted = ["--prompt-ids", str(first), "--max-tokens", str(_RECALL_WINDOW - 1)]
    greedy = ["--ignore-eos", "--temperature", "0", "--mode", "exact", "--threads", str(threads)]
    ids = hotcold("generate", str(model), *wanted, *greedy)["ids"]
    text = scratch / "ids.jsonl"
    text.write_text(json.dumps({"ids": ids}) + "\n")
    window = ["--max-windows", "1", "--context-window", str(_RECALL_WINDOW)]
    found = {}
    for mode in predicted:
        run = hotcold("perplexity", str(model), "--text", str(text), "--mode", mode, *window,
                      "--threads", str(threads))  # fmt: skip
        found[mode] = {
            "by_layer": run["recall"],
            "tokens": run["context_window"],
            "distinct_tokens": len(set(ids)),
        }
    return found


def _progress(run: Json) -> str:
    ours, theirs = run["hotcold"], run["llama_cpp"]
    decoded = [f"{mode} {found['tokens_per_s']:.2f}" for mode, found in ours["modes"].items()]
    return (
        f"decode {', '.join(decoded)} against {theirs['decode']:.2f} tokens/s, prefill "
        f"{ours['prefill']:.2f} against {theirs['prefill']:.2f}"
    )


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-bench", default=None, help="llama.cpp's llama-bench; from PATH without it.")
@click.option("--gguf", type=click.Path(path_type=Path), help="Keep the converted weights here.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Tokens decoded a run.")
@click.option("--prompt-tokens", default=128, show_default=True, help="Tokens of the prefill run.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=("exact",),
              show_default=True, help="May be given several times.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    model: Path,
    llama_bench: str | None,
    gguf: Path | None,
    threads: int,
    rounds: int,
    tokens: int,
    prompt_tokens: int,
    modes: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure decode, in each mode, and prefill of both, in turn."""
    from benchmarks.llama_gguf import write_gguf

    program = llama_bench or shutil.which("llama-bench")
    if program is None:
        raise click.UsageError("there is no llama-bench on PATH; give --llama-bench")
    modes = tuple(dict.fromkeys(modes))
    _check_predictors(model, modes)
    with tempfile.TemporaryDirectory() as scratch:
        weights = gguf or Path(scratch) / "model.gguf"
        if not weights.exists():
            write_gguf(model, weights)
        runs = []
        with _loaded(model, threads, modes, prompt_tokens) as measure:
            for number in range(rounds):
                theirs = _llama_cpp(program, weights, threads, tokens, prompt_tokens)
                runs.append({"llama_cpp": theirs, "hotcold": measure(tokens)})
                click.echo(f"round {number + 1}: {_progress(runs[-1])}", err=True)
        ray.shutdown()
        recall = _recall(model, threads, modes, Path(scratch))
    sizes = {"modes": modes, "tokens": tokens, "prompt_tokens": prompt_tokens}
    report = {**where_and_when(model, threads), **sizes, "recall": recall, "runs": runs}
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
