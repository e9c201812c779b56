"""Two checkouts of hotcold beside each other: the same tokens, and how fast each is.

    python -m benchmarks.beside OTHER --tokens [--model MODEL]... [--with OPTIONS]...
    python -m benchmarks.beside OTHER --speed --model MODEL [--with OPTIONS]...

`--tokens` asks both for greedy answers to short prompts and to one that goes through matrix
products, and prints those that differ: of each MODEL, else of the embedded model and of a tiny
random model of every variant that the tests know, in several formats. `--speed` runs `hotcold
bench` in both, in turn, and prints the medians of the ratios, this checkout's tokens a second over
the other's. Both do so for each group of OPTIONS, such as "--mode sign --dtype q8".
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from benchmarks.runs import Json, spread

HERE = Path(__file__).resolve().parents[1]
Case = tuple[Path | None, list[str]]  # a model, None for the embedded one, and options
NUM_TOKENS = 24
# Short prompts go through kernels, the last one through matrix products.
PROMPTS = ([5, 17, 29], [3, 1, 4, 1, 5, 9, 2, 6], [(7 + 31 * i) % 97 for i in range(70)])
BENCHES = {
    "decode": ("decode",),
    "decode, 8 requests": ("decode", "--batch", "8"),
    "prefill of 128": ("prefill",),
    "prefill of 512": ("prefill", "--prompt-tokens", "512"),
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


def compare_tokens(other: Path, cases: Iterable[Case]) -> int:
    """Print a line a case, and return how many differ."""
    num_different = 0
    for path, options in cases:
        same = answers(HERE, path, options) == answers(other, path, options)
        name = " ".join([path.name if path else "demo", *options])
        click.echo(f"{name}: {'the same' if same else 'DIFFERENT'}")
        num_different += not same
    return num_different


def known_cases(folder: Path) -> Iterator[Case]:
    """The embedded model in its modes and formats, and tiny models, made in `folder`."""
    from tests.tiny_models import VARIANTS, make_tiny  # transformers takes seconds

    for line in ("", "--mode dense", "--mode sign", "--mode lowrank", "--dtype q8", "--dtype q4"):
        yield None, line.split()
    for variant in VARIANTS:
        for dtype in ("float32", "bfloat16") if variant == "llama-gqa" else ("float32",):
            path = make_tiny(variant, folder / f"{variant}-{dtype}", dtype)
            yield path, []
            yield path, ["--mode", "dense"]


def compare_speed(
    other: Path, model: Path, options: Sequence[str], runs: int, benches: Sequence[str]
) -> Json:
    """Run these of BENCHES in both checkouts in turn; name -> ratios, one a run."""
    ratios: Json = {name: [] for name in benches}
    for i in range(runs):
        for name in benches:
            arguments = BENCHES[name]
            order = (HERE, other) if i % 2 else (other, HERE)
            rates = {
                checkout: _tokens_per_s(checkout, [*arguments, str(model), *options])
                for checkout in order
            }
            ratios[name].append(rates[HERE] / rates[other])
            click.echo(f"{name}: {rates[HERE]:.2f} beside {rates[other]:.2f} tokens/s", err=True)
    return ratios


def _tokens_per_s(checkout: Path, arguments: Sequence[str]) -> float:
    said = run_in(checkout, "jobs.cli", "bench", *arguments, "--json")
    return float(json.loads(said.splitlines()[-1])["tokens_per_s"])


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tokens", is_flag=True, help="Compare greedy tokens.")
@click.option("--speed", is_flag=True, help="Compare tokens a second.")
@click.option("--model", "models", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--with", "groups", multiple=True, default=[""], metavar="OPTIONS")
@click.option("--bench", "benches", multiple=True, type=click.Choice(list(BENCHES)))
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
def main(
    other: Path,
    tokens: bool,
    speed: bool,
    models: tuple[Path, ...],
    groups: tuple[str, ...],
    runs: int,
    benches: tuple[str, ...],
) -> None:
    """Compare this checkout of hotcold with OTHER, the folder of another."""
    if not (tokens or (speed and models)):
        raise click.UsageError("nothing to compare: give --tokens, or --speed and a --model")
    other = other.resolve()
    cases = [(model.resolve(), group.split()) for model in models for group in groups]
    for model, options in cases if speed else []:
        found = compare_speed(other, model, options, runs, benches or list(BENCHES))
        for name, ratios in found.items():
            label = " ".join([model.name, *options])
            click.echo(f"{label}, {name}: {spread(ratios)} times the other's tokens/s")
    if tokens:
        with tempfile.TemporaryDirectory() as folder:
            num_different = compare_tokens(other, cases or known_cases(Path(folder)))
        if num_different:
            raise click.ClickException(f"{num_different} cases answer differently")


if __name__ == "__main__":
    main()
