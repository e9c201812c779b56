"""Two checkouts of hotcold beside each other: the same tokens, and how fast each is.

    python -m benchmarks.beside OTHER --tokens [--model MODEL]... [--with OPTIONS]...
    python -m benchmarks.beside OTHER --speed --model MODEL [--with OPTIONS]...

`--tokens` asks both for greedy answers to short prompts and to one that goes through matrix
products: of each MODEL, else of the embedded model and of a tiny random model of every variant that
the tests know. `--speed` runs `hotcold bench` in both, in turn: ratios of this checkout's tokens a
second to the other's. Both do so for each group of OPTIONS, such as "--mode sign --dtype q8".
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from benchmarks.frame import EXISTING, Checkout, Json, program, progress, spread, table

Case = tuple[Path | None, list[str]]  # a model, None for the embedded one, and options
# Short prompts go through kernels, the last one through matrix products.
PROMPTS = ([5, 17, 29], [3, 1, 4, 1, 5, 9, 2, 6], [(7 + 31 * i) % 97 for i in range(70)])
BENCHES = {
    "decode": ("decode",),
    "decode, 8 requests": ("decode", "--batch", "8"),
    "prefill of 128": ("prefill",),
    "prefill of 512": ("prefill", "--prompt-tokens", "512"),
}


def answers(checkout: Checkout, model: Path | None, options: Sequence[str]) -> list[list[int]]:
    """The greedy ids that a checkout answers to PROMPTS, all of them asked at once."""
    sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    lines = [{"id": str(i), "ids": ids, "sampling": sampling} for i, ids in enumerate(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
        named = ["--model", str(model)] if model else []
        files = ["--requests", str(asked), "--out", str(answered), "--own"]
        checkout.run(*files, *named, *options, module="hotcold.jobs.generate")
        return [json.loads(line)["ids"] for line in answered.read_text().splitlines()]


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


@program
@click.argument("other", type=EXISTING)
@click.option("--tokens", is_flag=True, help="Compare greedy tokens.")
@click.option("--speed", is_flag=True, help="Compare tokens a second.")
@click.option("--model", "models", multiple=True, type=EXISTING)
@click.option("--with", "groups", multiple=True, default=[""], metavar="OPTIONS")
@click.option("--bench", "benches", multiple=True, type=click.Choice([*BENCHES]), default=BENCHES)
@click.option("--runs", type=click.IntRange(min=1), default=3)
def main(
    other: Path, tokens: bool, speed: bool, models: tuple[Path, ...], groups: tuple[str, ...],
    benches: tuple[str, ...], runs: int,
) -> tuple[Json, str]:  # fmt: skip
    """Compare this checkout of hotcold with OTHER, the folder of another."""
    if not (tokens or (speed and models)):
        raise click.UsageError("nothing to compare: give --tokens, or --speed and a --model")
    here, there = both = Checkout(), Checkout(other.resolve())
    cases: list[Case] = [(model.resolve(), group.split()) for model in models for group in groups]
    report: Json = {"ratios": {}, "same": [], "wrong": []}
    for model, options in cases if speed else []:
        for number in range(runs):
            for name in benches:
                rates = {
                    one.folder: one.json("bench", *BENCHES[name], str(model), *options)
                    for one in both[:: 1 if number % 2 else -1]
                }
                mine, its = (rates[one.folder]["tokens_per_s"] for one in both)
                what = " ".join([model.name if model else "demo", *options, name])
                report["ratios"].setdefault(what, []).append(mine / its)
                progress(f"{what}: {mine:.2f} beside {its:.2f} tokens/s")
    with tempfile.TemporaryDirectory() as folder:
        for path, options in (cases or known_cases(Path(folder))) if tokens else []:
            name = " ".join([path.name if path else "demo", *options])
            is_same = answers(here, path, options) == answers(there, path, options)
            report["same" if is_same else "wrong"].append(name)
            progress(f"{name}: {'the same' if is_same else 'DIFFERENT'}")
    lines = [[name, spread(ratios)] for name, ratios in report["ratios"].items()]
    said = [f"{len(report['same'])} cases answer the same, {len(report['wrong'])} not\n"] * tokens
    return report, table(["bench", "times the other's tokens/s"], lines) * speed + "".join(said)


if __name__ == "__main__":
    main()
