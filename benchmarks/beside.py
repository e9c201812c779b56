"""Two checkouts of hotcold beside each other: the same tokens, and how fast each is.

    python -m benchmarks.beside OTHER --tokens
    python -m benchmarks.beside OTHER --speed MODEL

`--tokens` asks both for greedy answers of the embedded model and of a tiny random model of every
variant that the tests know, in several formats, to short prompts and to one that goes through
matrix products, and prints those that differ. `--speed` runs `hotcold bench` on a model in both, in
turn, and prints the medians of the ratios, this checkout's tokens a second over the other's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.runs import Json, spread

HERE = Path(__file__).resolve().parents[1]
NUM_TOKENS = 24
# Short prompts go through kernels, the last one through matrix products.
PROMPTS = ([5, 17, 29], [3, 1, 4, 1, 5, 9, 2, 6], [(7 + 31 * i) % 97 for i in range(70)])
BENCHES = {
    "decode": ("decode",),
    "decode, 8 requests": ("decode", "--batch", "8"),
    "prefill of 128": ("prefill",),
}


def run_in(checkout: Path, module: str, *arguments: str) -> str:
    """Run a module of a checkout and return what it printed.

    Errors:  ClickException with its last line where it failed
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise click.ClickException(f"{checkout}: {' '.join(arguments)}: {said[-1]}")
    return done.stdout


def answers(checkout: Path, model: Path | None, options: Sequence[str]) -> list[list[int]]:
    """The greedy ids that a checkout answers to PROMPTS, all of them asked at once."""
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [{"id": str(i), "ids": ids, "sampling": sampling} for i, ids in enumerate(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
        where = ["--model", str(model)] if model else []
        files = ["--requests", str(asked), "--out", str(answered)]
        run_in(checkout, "jobs.generate", *files, *where, *options)
        found = [json.loads(line) for line in answered.read_text().splitlines()]
    return [line["ids"] for line in found]


def compare_tokens(other: Path) -> int:
    """Print a line a model, and return how many differ."""
    from tests.tiny_models import VARIANTS, make_tiny  # transformers takes seconds

    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, Path | None, list[str]]] = [
            (f"demo {' '.join(options)}", None, options)
            for options in (
                *([], ["--mode", "dense"], ["--mode", "sign"], ["--mode", "lowrank"]),
                *(["--dtype", "q8"], ["--dtype", "q4"]),
            )
        ]
        for variant in VARIANTS:
            for dtype in ("float32", "bfloat16") if variant == "llama-gqa" else ("float32",):
                path = make_tiny(variant, Path(folder, f"{variant}-{dtype}"), dtype)
                cases.append((path.name, path, []))
                cases.append((f"{path.name} dense", path, ["--mode", "dense"]))
        for name, path, options in cases:
            same = answers(HERE, path, options) == answers(other, path, options)
            click.echo(f"{name}: {'the same' if same else 'DIFFERENT'}")
            num_different += not same
    return num_different


def compare_speed(other: Path, model: str, runs: int) -> Json:
    """Run each of BENCHES in both checkouts in turn; name -> ratios, one a run."""
    ratios: Json = {name: [] for name in BENCHES}
    for i in range(runs):
        for name, arguments in BENCHES.items():
            order = (HERE, other) if i % 2 else (other, HERE)
            rates = {checkout: _tokens_per_s(checkout, arguments, model) for checkout in order}
            ratios[name].append(rates[HERE] / rates[other])
            click.echo(f"{name}: {rates[HERE]:.2f} beside {rates[other]:.2f} tokens/s", err=True)
    return ratios


def _tokens_per_s(checkout: Path, arguments: Sequence[str], model: str) -> float:
    said = run_in(checkout, "jobs.cli", "bench", *arguments, model, "--json")
    return float(json.loads(said.splitlines()[-1])["tokens_per_s"])


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tokens", is_flag=True, help="Compare greedy tokens.")
@click.option("--speed", "model", metavar="MODEL", help="Compare tokens a second on this model.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
def main(other: Path, tokens: bool, model: str | None, runs: int) -> None:
    """Compare this checkout of hotcold with OTHER, the folder of another."""
    if not tokens and model is None:
        raise click.UsageError("nothing to compare: give --tokens or --speed MODEL")
    if model is not None:
        for name, ratios in compare_speed(other.resolve(), model, runs).items():
            click.echo(f"{name}: {spread(ratios)} times the other's tokens/s")
    if tokens and (num_different := compare_tokens(other.resolve())):
        raise click.ClickException(f"{num_different} models answer differently")


if __name__ == "__main__":
    main()
