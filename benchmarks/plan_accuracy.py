"""What `hotcold plan` promises beside what `hotcold bench decode` measures, in turn.

    python -m benchmarks.plan_accuracy --out benchmarks/results/plan-accuracy

Models of random weights are made in a scratch folder, one at a time, and profiled on random ids.
Each round surveys the machine anew, plans and measures within a minute or two, for a shared
machine's bandwidth wanders. The survey replaces the one that hotcold keeps of this machine.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path
from statistics import median

import click

from benchmarks.vs_llama_cpp import (
    Json,
    hotcold,
    shape_text,
    spread,
    table_option,
    where_and_when,
    write_report,
)
from model.config import ModelConfig

CASES = (("llama-7b", 0.10), ("opt-6.7b", 0.03), ("falcon-7b-like", 0.05))
_PROFILE_TOKENS = 2048
_SEED = 2026
# A plan's names of the parts, and the measurement's.
_PARTS = {"attention": "attention", "head": "head", "neurons": "ffn", "exchanges": "exchange"}


def table_of(report: Json) -> str:
    """The report as Markdown: speeds, then milliseconds a token by part."""
    first = report["cases"][0]
    lines = [
        f"{report['layers']} layers, float16; batch 1, mode exact; {report['machine']}; "
        f"{report['date']}; {len(first['rounds'])} rounds: survey, plan, measure",
        "",
        "| shape, share of neurons that fire | planned, tokens/s | measured, tokens/s | planned / "
        "measured (least to most) |",
        "| --- | --- | --- | --- |",
    ]
    for case in report["cases"]:
        planned, measured = _speeds(case)
        ratios = [a / b for a, b in zip(planned, measured, strict=True)]
        lines.append(
            f"| {case['shape_name']}, {case['density']:.1%} | {median(planned):.2f} | "
            f"{median(measured):.2f} | {spread(ratios)} |"
        )
    lines += [
        "",
        "Milliseconds a token, planned / measured, medians:",
        "",
        f"| shape | {' | '.join(_PARTS.values())} | python | all |",
        f"| --- |{' --- |' * (len(_PARTS) + 2)}",
        *(_part_row(case) for case in report["cases"]),
    ]
    return "\n".join(lines) + "\n"


def _speeds(case: Json) -> tuple[list[float], list[float]]:
    return (
        [each["planned"]["tokens_per_s"] for each in case["rounds"]],
        [each["measured"]["tokens_per_s"] for each in case["rounds"]],
    )


def _part_row(case: Json) -> str:
    """Of a plan, python is nothing: it counts what services and exchanges take."""
    rounds = case["rounds"]

    def cell(part: str) -> str:
        planned = median(_planned_ms(each["planned"]).get(part, 0.0) for each in rounds)
        measured = median(each["measured"]["per_token_ms"][part] for each in rounds)
        return f"{planned:.2f} / {measured:.2f}"

    cells = " | ".join(cell(part) for part in (*_PARTS.values(), "python", "total"))
    return f"| {case['shape_name']} | {cells} |"


def _planned_ms(plan: Json) -> dict[str, float]:
    """A plan's milliseconds by the measurement's names of the parts; parts on devices add up."""
    found = dict.fromkeys(_PARTS.values(), 0.0)
    for part in plan["parts"]:
        found[_PARTS[part["name"]]] += part["ms"]
    return found | {"total": plan["token_s"] * 1e3}


def _case(name: str, density: float, layers: int, rounds: int, tokens: int, folder: Path) -> Json:
    """Make the model, profile it and measure; the folder is empty again afterwards."""
    model = folder / name
    sizes = ["--shape", name, "--layers", str(layers), "--density", str(density)]
    try:
        made = hotcold("make-model", str(model), *sizes, "--dtype", "f16")
        config = ModelConfig.from_directory(model)
        rng = random.Random(_SEED)
        text = folder / "ids.jsonl"
        ids = [rng.randrange(config.vocab_size) for _ in range(_PROFILE_TOKENS)]
        text.write_text(json.dumps({"ids": ids}) + "\n")
        hotcold("profile", str(model), "--text", str(text), "--inputs", "0")
        found = []
        for number in range(rounds):
            found.append(_round(model, tokens))
            click.echo(f"{name}, round {number + 1}: {_progress(found[-1])}", err=True)
        about = where_and_when(model, found[0]["measured"]["num_threads"])
    finally:
        shutil.rmtree(model, ignore_errors=True)
    return {
        "shape_name": name,
        "shape": shape_text(config),
        "asked_density": density,
        "density": made["density"],
        "machine": about["machine"],
        "rounds": found,
    }


def _round(model: Path, tokens: int) -> Json:
    surveyed = hotcold("doctor", "--fresh")["measured"]
    plan = hotcold("plan", str(model), "--mode", "exact")
    measured = hotcold("bench", "decode", str(model), "--mode", "exact", "--tokens", str(tokens))
    planned = {name: plan[name] for name in ("tokens_per_s", "token_s", "parts")}
    return {
        "machine": surveyed,
        "planned": planned,
        "measured": measured,
        "ratio": plan["tokens_per_s"] / measured["tokens_per_s"],
    }


def _progress(found: Json) -> str:
    return (
        f"planned {found['planned']['tokens_per_s']:.2f}, measured "
        f"{found['measured']['tokens_per_s']:.2f} tokens/s, ratio {found['ratio']:.2f}"
    )


@click.command()
@click.option("--shape", "cases", type=(str, float), multiple=True, default=CASES,
              show_default=True, help="A make-model shape and a density; repeatable.")  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    cases: tuple[tuple[str, float], ...], layers: int, rounds: int, tokens: int, out: Path | None
) -> None:
    """Compare planned and measured decoding speed of several shapes."""
    found = []
    for name, density in cases:
        with tempfile.TemporaryDirectory() as scratch:
            found.append(_case(name, density, layers, rounds, tokens, Path(scratch)))
    report = {
        "machine": found[0]["machine"],
        "date": found[0]["rounds"][0]["machine"]["date"],
        "batch": 1,
        "layers": layers,
        "tokens": tokens,
        "cases": found,
    }
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
