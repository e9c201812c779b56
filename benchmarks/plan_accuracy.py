"""What `hotcold plan` promises beside what `hotcold bench decode` measures, in turn.

    python -m benchmarks.plan_accuracy --out benchmarks/results/plan-accuracy

Models of random weights are made in a scratch folder, one at a time, and profiled on random ids.
The machine is surveyed and the plan made; then the model decodes some tokens, again and again,
between two plain reads of memory. A shared machine's bandwidth wanders within seconds, so the
plan's memory times are taken at what those reads got, relative to the survey's. The survey replaces
the one that hotcold keeps of this machine.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path
from statistics import median

import click

from benchmarks.runs import (
    Json,
    hotcold,
    shape_text,
    spread,
    table_option,
    where_and_when,
    write_report,
)
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.jobs.bench.decode import decode_report, decode_request
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.placement.machine.measure_node import measure_read_bandwidth

CASES = (("llama-7b", 0.10), ("opt-6.7b", 0.03), ("falcon-7b-like", 0.05))
_PROFILE_TOKENS = 2048
_SEED = 2026
_PROMPT = 16  # tokens before those that are decoded
_READ_BYTES, _READ_S = 1 << 29, 0.3
# A plan's names of the parts, and the measurement's.
_PARTS = {"attention": "attention", "head": "head", "neurons": "ffn", "exchanges": "exchange"}


def table_of(report: Json) -> str:
    """The report as Markdown: speeds, then milliseconds a token by part."""
    first = report["cases"][0]
    lines = [
        f"{report['layers']} layers, float16; batch 1, mode exact; {report['machine']}; "
        f"{report['date']}; {len(first['rounds'])} rounds",
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
        config = read_config(model)
        rng = random.Random(_SEED)
        text = folder / "ids.jsonl"
        ids = [rng.randrange(config.vocab_size) for _ in range(_PROFILE_TOKENS)]
        text.write_text(json.dumps({"ids": ids}) + "\n")
        hotcold("profile", str(model), "--text", str(text), "--inputs", "0")
        surveyed = hotcold("doctor", "--fresh")["measured"]
        plan = hotcold("plan", str(model), "--mode", "exact")
        found = []
        system, config = prepare_system(model, SystemOptions(mode="exact"))
        with System.start(system) as running:
            running.complete(decode_request(config, _PROMPT, tokens))  # warms up
            for number in range(rounds):
                measured = _measure(running, system, config, tokens)
                planned = _planned(plan, surveyed, measured["read_gb_per_s"])
                ratio = planned["tokens_per_s"] / measured["tokens_per_s"]
                found.append({"planned": planned, "measured": measured, "ratio": ratio})
                click.echo(f"{name}, round {number + 1}: {_progress(found[-1])}", err=True)
        about = where_and_when(model, system.num_threads)
    finally:
        shutil.rmtree(model, ignore_errors=True)
    return {
        "shape_name": name,
        "shape": shape_text(config),
        "asked_density": density,
        "density": made["density"],
        "machine": about["machine"],
        "survey": surveyed,
        "plan": plan,
        "rounds": found,
    }


def _measure(running: System, system: SystemConfig, config: ModelConfig, tokens: int) -> Json:
    """Decode once; what memory gave a plain read is the mean of one before and one after."""
    before = measure_read_bandwidth(system.num_threads, _READ_BYTES, _READ_S)
    result = running.complete(decode_request(config, _PROMPT, tokens))
    after = measure_read_bandwidth(system.num_threads, _READ_BYTES, _READ_S)
    return decode_report(system, config, [result], (before + after) / 2)


def _planned(plan: Json, surveyed: Json, read_gb_per_s: float) -> Json:
    """The plan, had the survey found memory as fast as it was beside the measured run."""
    surveyed_gb_per_s = sum(node["read_gb_per_s"] for node in surveyed["nodes"])
    slower = surveyed_gb_per_s / read_gb_per_s
    parts = [
        part | {"ms": part["ms"] * (1.0 if part["name"] == "exchanges" else slower)}
        for part in plan["parts"]
    ]
    token_s = sum(part["ms"] for part in parts) / 1e3
    return {"parts": parts, "token_s": token_s, "tokens_per_s": 1 / token_s}


def _progress(found: Json) -> str:
    return (
        f"planned {found['planned']['tokens_per_s']:.2f}, measured "
        f"{found['measured']['tokens_per_s']:.2f} tokens/s, ratio {found['ratio']:.2f}"
    )


@click.command()
@click.option("--shape", "cases", type=(str, float), multiple=True, default=CASES,
              show_default=True, help="A make-model shape and a density; repeatable.")  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=11, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=24, show_default=True)
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
        "date": found[0]["survey"]["date"],
        "batch": 1,
        "layers": layers,
        "tokens": tokens,
        "cases": found,
    }
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
