"""hotcold beside llama.cpp: the same weights, the same cores, in turn, A B A B.

    python -m benchmarks.vs_llama_cpp MODEL --llama-bench PATH --out benchmarks/results/NAME

MODEL is a Llama checkpoint in float16, such as `hotcold make-model --shape llama-7b --layers 8`
writes. `llama-bench` is taken from PATH unless given; `gguf` comes with the `bench` extra. The
ratio of each pair is taken by itself, so that a machine whose speed drifts does not bend it.
"""

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.llama_gguf import write_gguf
from model.config import ModelConfig
from placement.sysfs import read_cpu


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-bench", default=None, help="llama.cpp's llama-bench; from PATH without it.")
@click.option("--gguf", type=click.Path(path_type=Path), help="Keep the converted weights here.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Tokens decoded a run.")
@click.option("--prompt-tokens", default=128, show_default=True, help="Tokens of the prefill run.")
@click.option("--mode", default="exact", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
def main(
    model: Path,
    llama_bench: str | None,
    gguf: Path | None,
    threads: int,
    rounds: int,
    tokens: int,
    prompt_tokens: int,
    mode: str,
    out: Path | None,
) -> None:
    """Measure decode and prefill of both, in turn."""
    program = llama_bench or shutil.which("llama-bench")
    if program is None:
        raise click.UsageError("there is no llama-bench on PATH; give --llama-bench")
    with tempfile.TemporaryDirectory() as scratch:
        weights = gguf or Path(scratch) / "model.gguf"
        if not weights.exists():
            write_gguf(model, weights)
        runs = []
        for number in range(rounds):
            theirs = _llama_cpp(program, weights, threads, tokens, prompt_tokens)
            ours = _hotcold(model, threads, tokens, prompt_tokens, mode)
            runs.append({"llama_cpp": theirs, "hotcold": ours})
            click.echo(f"round {number + 1}: {_pair(runs[-1])}", err=True)
    report = _report(model, runs, threads, tokens, prompt_tokens, mode)
    table = _table(report)
    click.echo(table)
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(table)


def _llama_cpp(
    program: str, weights: Path, threads: int, tokens: int, prompt_tokens: int
) -> dict[str, Any]:
    command = [program, "-m", str(weights), "-t", str(threads), "-r", "3", "-o", "json"]
    command += ["-p", str(prompt_tokens), "-n", str(tokens)]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rates = {("decode" if row["n_gen"] else "prefill"): median(row["samples_ts"]) for row in rows}
    return rates | {"build": rows[0].get("build_commit", "")}


def _hotcold(
    model: Path, threads: int, tokens: int, prompt_tokens: int, mode: str
) -> dict[str, Any]:
    common = [str(model), "--threads", str(threads), "--mode", mode, "--json"]
    decode = _bench("decode", *common, "--tokens", str(tokens), "--repeat", "3")
    prefill = _bench("prefill", *common, "--prompt-tokens", str(prompt_tokens), "--repeat", "3")
    return {"decode": decode["tokens_per_s"], "prefill": prefill["tokens_per_s"], "details": decode}


def _bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "jobs.cli", "bench", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _pair(run: dict[str, Any]) -> str:
    return ", ".join(
        f"{part} {run['hotcold'][part]:.2f} against {run['llama_cpp'][part]:.2f} tokens/s"
        for part in ("decode", "prefill")
    )


def _report(
    model: Path, runs: list[dict[str, Any]], threads: int, tokens: int, prompt: int, mode: str
) -> dict[str, Any]:
    config = ModelConfig.from_directory(model)
    return {
        "machine": f"{read_cpu().name}, {threads} threads, Linux {platform.machine()}",
        "date": date.today().isoformat(),
        "shape": f"{config.num_layers} layers of d {config.hidden_size}, FFN {config.ffn_size}, "
        f"vocabulary {config.vocab_size}, {config.dtype}",
        "batch": 1,
        "mode": mode,
        "tokens": tokens,
        "prompt_tokens": prompt,
        "runs": runs,
    }


def _table(report: dict[str, Any]) -> str:
    runs = report["runs"]
    lines = [
        f"{report['shape']}; batch 1, mode {report['mode']}; {report['machine']}; "
        f"{report['date']}; {len(runs)} rounds in turn",
        "",
        "| | llama.cpp F16, tokens/s | hotcold f16, tokens/s | ratio (least to most) |",
        "| --- | --- | --- | --- |",
    ]
    names = {
        "decode": f"decode of {report['tokens']} tokens",
        "prefill": f"prefill of {report['prompt_tokens']} tokens",
    }
    for part, name in names.items():
        theirs = [run["llama_cpp"][part] for run in runs]
        ours = [run["hotcold"][part] for run in runs]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        lines.append(
            f"| {name} | {median(theirs):.2f} | {median(ours):.2f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    last = sorted((run["hotcold"] for run in runs), key=lambda run: run["decode"])[len(runs) // 2]
    details = last["details"]
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in details["per_token_ms"].items())
    lines += [
        "",
        f"hotcold's decode: {details['density']:.1%} of the neurons computed; "
        f"{details['bytes_per_token'] / 1e9:.2f} GB a token, {details['gb_per_s']:.1f} GB/s of "
        f"{details['read_gb_per_s']:.1f} that a plain read got; milliseconds a token: {parts}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
