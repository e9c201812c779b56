"""What formats and modes cost real models: perplexity, KL divergence and answers beside float32.

    python -m benchmarks.quality smollm2.gguf gemma3.gguf --out benchmarks/results/quality

Each MODEL is a GGUF file. Its weights as ggml dequantizes them, in float32, are what all else is
compared with: the file as it is, f16, and q8 and q4 made of the float32 weights; each in the modes
`dense` and `threshold`, whose thresholds `hotcold profile` makes of the file with its own defaults.
All tokens go through kernels, with a float32 KV cache. The text is docstrings of Python's standard
library and this project's licence; the questions are benchmarks/questions.jsonl.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmarks.quality_models import (
    bytes_shares,
    running,
    scores,
    targets,
    window_logits,
    write_dequantized,
)
from benchmarks.runs import Json, hotcold, shape_text, table_option, where_and_when, write_report
from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.actors.setup.modes import has_thresholds
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import read_thresholds

_HERE = Path(__file__).parent
_MODULES = (
    "argparse", "asyncio", "calendar", "collections", "decimal", "difflib", "doctest", "email",
    "fractions", "heapq", "logging", "random", "shlex", "statistics", "string", "textwrap",
    "threading", "tokenize", "typing", "unittest", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
_WINDOW, _UNSCORED = 256, 16
_SHOTS = (
    "Question: What is the capital of Portugal?\nAnswer: Lisbon\n\n"
    "Question: How many wheels does a bicycle have?\nAnswer: 2\n\n"
)
_ANSWER_TOKENS = 8


def quality_text() -> str:
    """The text: of each module its own docstring and those of its public classes, and a licence."""
    parts = [(_HERE.parent / "LICENSE").read_text()]
    for name in _MODULES:
        module = importlib.import_module(name)
        documented = [module, *(each for _, each in inspect.getmembers(module, inspect.isclass))]
        own = (each.__doc__ for each in documented)
        parts += [inspect.cleandoc(text) for text in own if isinstance(text, str)]
    return "\n\n".join(dict.fromkeys(parts))


def questions() -> list[tuple[str, list[str]]]:
    """Questions, each with the answers of which one must be in what the model says."""
    lines = (_HERE / "questions.jsonl").read_text().splitlines()
    return [(found["question"], found["answers"]) for found in map(json.loads, lines)]


def is_right(said: str, answers: list[str]) -> bool:
    """Whether an answer stands in the first line, as whole words."""
    line = said.strip().split("\n")[0]
    return any(re.search(rf"\b{re.escape(one)}s?\b", line, re.IGNORECASE) for one in answers)


class Subject:
    """One model's tokens: windows of the text, and the questions."""

    def __init__(self, path: Path, num_windows: int) -> None:
        tokenizer = Tokenizer.from_model(path)
        if tokenizer is None:
            raise click.ClickException(f"{path}: has no tokenizer")
        self.path, self.config, self._tokenizer = path, read_config(path), tokenizer
        opening = tokenizer.encode("")
        ids = tokenizer.encode(quality_text(), add_special_tokens=False)
        size = _WINDOW - len(opening)
        starts = [(len(ids) - size) * i // max(1, num_windows - 1) for i in range(num_windows)]
        self.windows = [opening + ids[start : start + size] for start in starts]
        self._shots = tokenizer.encode(_SHOTS)
        self.num_right_of = len(questions())

    def num_right(self, engine: Engine) -> int:
        """Questions that the engine answers rightly, greedily, after two that are answered."""
        shots, right = len(self._shots), 0
        _run(engine, self._shots, 0)
        for question, answers in questions():
            asked = self._tokenizer.encode(f"Question: {question}\nAnswer:", False)
            found, at, next_ids = [], shots, asked
            for _ in range(_ANSWER_TOKENS):
                row = _run(engine, next_ids, at)
                at += len(next_ids)
                next_ids = [int(row.argmax())]
                found += next_ids
            right += is_right(self._tokenizer.decode(found), answers)
        return right


def _run(engine: Engine, ids: list[int], at: int) -> np.ndarray:
    """Logits after the last of `ids`, the first of which stands at position `at`."""
    row = np.empty(0, np.float32)
    for begin in range(0, len(ids), engine.kernel_tokens):
        part = ids[begin : begin + engine.kernel_tokens]
        places = range(at + begin, at + begin + len(part))
        row = engine.step(part, places, [0] * len(part))[0]
    return row.copy()


def _variants(subject: Subject, scratch: Path) -> Iterator[tuple[str, Path, str]]:
    """Name, path and --dtype of each format; float32 first."""
    wide = write_dequantized(subject.path, scratch / "float32", "float32")
    yield "float32", wide, ""
    yield "as stored", subject.path, ""
    yield "f16", write_dequantized(subject.path, scratch / "float16", "float16"), ""
    yield "q8", wide, "q8"
    yield "q4", wide, "q4"


def _thresholds(subject: Subject, scratch: Path) -> tuple[list[Thresholds], Json]:
    file = scratch / "thresholds.safetensors"
    out = ["--out", str(scratch / "profile.safetensors"), "--thresholds-out", str(file)]
    told = hotcold("profile", str(subject.path), *out)
    found = read_thresholds(file, ModelIdentity.of(subject.path), subject.config)
    kept = ("tokens", "seconds", "target_kld", "mean_kld", "ffn_bytes_share")
    return found.thresholds.of_layers(), {name: told[name] for name in kept}


def measure(path: Path, num_windows: int, threads: int) -> Json:
    """All formats and modes of one model."""
    subject, rows = Subject(path, num_windows), []
    dense = np.empty((0, 0), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        thresholds, calibrated = None, None
        if has_thresholds(subject.config):
            thresholds, calibrated = _thresholds(subject, Path(folder))
        for name, variant, dtype in _variants(subject, Path(folder)):
            with running(variant, dtype, _WINDOW, threads) as system:
                for mode in ("dense", THRESHOLD) if thresholds else ("dense",):
                    own = thresholds if mode == THRESHOLD else None
                    engine = system.engine(mode, thresholds=own)
                    if not dense.size:
                        found = window_logits(engine, subject.windows, _UNSCORED)
                        dense = np.array([row.copy() for row in found])
                    rows.append({"format": name, "mode": mode, **_scores(engine, subject, dense)})
                    click.echo(f"{path.stem}, {name}, {mode}: {rows[-1]}", err=True)
    return {
        "model": path.stem,
        "shape": shape_text(subject.config),
        "thresholds": calibrated,
        "questions": subject.num_right_of,
        "scored_tokens": len(dense),
        "rows": rows,
    }


def _scores(engine: Engine, subject: Subject, dense: np.ndarray) -> Json:
    found = window_logits(engine, subject.windows, _UNSCORED)
    scored = scores(dense, found, targets(subject.windows, _UNSCORED))
    gates, ups, downs = bytes_shares(engine, subject.windows[0][:64])
    rows = RowBytes.of(subject.config)
    read = rows.read(gates, ups, downs)
    return {
        "ffn_bytes_share": read / (rows.first + rows.rest),
        **scored,
        "right": subject.num_right(engine),
    }


def table_of(report: Json) -> str:
    """The report as Markdown: a row for each model, format and mode."""
    lines = [
        f"{report['machine']}; {report['date']}; Python {report['python']}. KL divergence and "
        "likeliest token are beside the float32 weights of the same file in `dense`.",
        "",
        "| model | format | mode | FFN bytes read | perplexity | mean KL | same top token | "
        "right answers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in report["models"]:
        for row in model["rows"]:
            lines.append(
                f"| {model['model']} | {row['format']} | `{row['mode']}` | "
                f"{row['ffn_bytes_share']:.0%} | {row['ppl']:.2f} | {row['mean_kld']:.4f} | "
                f"{row['same_top']:.1%} | {row['right']} of {model['questions']} |"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--windows", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(models: tuple[Path, ...], windows: int, threads: int, out: Path | None) -> None:
    """Measure each of MODELS, GGUF files."""
    where = where_and_when(models[0], threads)
    report = {
        "machine": where["machine"],
        "date": where["date"],
        "python": platform.python_version(),
        "text_digest": hashlib.sha256(quality_text().encode()).hexdigest(),
        "models": [measure(path, windows, threads) for path in models],
    }
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
