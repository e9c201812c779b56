"""What formats, KV caches and the mode `threshold` cost real models, beside float32.

    python -m benchmarks.quality smollm2.gguf gemma3.gguf --out benchmarks/results/quality.md

Each MODEL is a GGUF file. Its weights as ggml dequantizes them, in float32, are what all else is
compared with: the file as it is, and with the thresholds that `hotcold profile` makes of it; q8 and
q4 made of the float32 weights; float32 with each KV cache; llama.cpp on the same file, where
llama-cpp-python is installed. Perplexity, mean KL divergence and how often the likeliest token is
the same are of Python's own documentation, by the kernels of decoding; the questions are
benchmarks/questions.jsonl.
"""

import importlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import click
import numpy as np
import torch

from benchmarks.frame import EXISTING, Json, head, heading, hotcold, program, progress, table
from hotcold.actors.protocol.options import KV_DTYPES
from hotcold.actors.setup.modes import has_thresholds
from hotcold.model.config.build import config_values, read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.decode.scoring import compare_logits
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.predictors.magnitude_thresholds import read_thresholds
from tests.actors.in_process import InProcessSystem

_HERE = Path(__file__).parent
_WINDOW, _UNSCORED, _STEP, _ANSWER = 256, 16, 16, 8  # tokens
_SHOTS = ("Question: What is the capital of Portugal?\nAnswer: Lisbon\n\n"
          "Question: How many wheels does a bicycle have?\nAnswer: 2\n\n")  # fmt: skip
# Logits (T, V) after tokens at positions `first` and on, behind those given before.
Logits = Callable[[Sequence[int], int], np.ndarray]


def write_dequantized(source: Path, folder: Path) -> None:
    """Write a GGUF file's weights as float32 safetensors."""
    folder.mkdir()
    values = {**config_values(source)[0], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint = Checkpoint(source)
    names = checkpoint.names()
    arrays = {name: to_float32(np.ascontiguousarray(checkpoint.array(name))) for name in names}
    specs = [TensorSpec(name, arrays[name].shape) for name in names]
    with SafetensorsWriter(folder, specs, "float32") as writer:
        for name in names:
            writer.write(name, torch.from_numpy(arrays[name]))


@contextmanager
def in_hotcold(
    path: Path, threads: int, dtype: str = "", kv_dtype: str = "float32", thresholds: str = ""
) -> Iterator[Logits]:
    """hotcold's services in this process, in `dense` or with thresholds."""
    options: Json = {"num_positions": 2 * _WINDOW, "max_tokens": _WINDOW, "kv_dtype": kv_dtype}
    with InProcessSystem(
        path, num_threads=threads, weight_dtype=dtype, has_down_norms=bool(thresholds), **options
    ) as system:
        engine = system.engine("dense")
        if thresholds:
            config = read_config(path)
            found = read_thresholds(Path(thresholds), ModelIdentity.of(path), config)
            engine = system.engine("threshold", thresholds=found.thresholds.of_layers())

        def logits(ids: Sequence[int], first: int) -> np.ndarray:
            parts = []
            for begin in range(0, len(ids), _STEP):
                step = list(ids[begin : begin + _STEP])
                places = range(first + begin, first + begin + len(step))
                parts.append(engine.step(step, places, [0] * len(step), len(step)).copy())
            return np.concatenate(parts)

        yield logits


@contextmanager
def in_llama_cpp(path: Path, threads: int) -> Iterator[Logits]:
    """llama.cpp in this process, by llama-cpp-python."""
    library = importlib.import_module("llama_cpp")
    llama = library.Llama(
        str(path), n_ctx=2 * _WINDOW, n_batch=_WINDOW, n_threads=threads, logits_all=True,
        verbose=False,
    )  # fmt: skip

    def logits(ids: Sequence[int], first: int) -> np.ndarray:
        llama.n_tokens = first
        llama.eval(list(ids))
        return np.array(llama.scores[first : first + len(ids)])

    try:
        yield logits
    finally:
        llama.close()


class Subject:
    """One model's tokens: windows of the text, and the questions."""

    def __init__(self, path: Path, num_windows: int) -> None:
        """Errors: ClickException for a model without a tokenizer."""
        tokenizer = Tokenizer.from_model(path)
        if tokenizer is None:
            raise click.ClickException(f"{path}: has no tokenizer")
        self._tokenizer, opening = tokenizer, tokenizer.encode("")
        ids = tokenizer.encode(
            "\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False
        )
        size = _WINDOW - len(opening)
        starts = [(len(ids) - size) * i // max(1, num_windows - 1) for i in range(num_windows)]
        self.windows = [opening + ids[start : start + size] for start in starts]
        self.float32: list[np.ndarray] = []

    def scores(self, logits: Logits) -> Json:
        """ppl, mean_kld and same_top beside the first that was scored, and right answers."""
        rows = [logits(ids, 0)[_UNSCORED:-1] for ids in self.windows]
        self.float32 = self.float32 or rows
        wanted = [token for ids in self.windows for token in ids[_UNSCORED + 1 :]]
        both = zip(np.concatenate(self.float32), np.concatenate(rows), wanted, strict=True)
        compared = [compare_logits(*each) for each in both]
        return {
            "ppl": float(np.exp(np.mean([each.nll for each in compared]))),
            "mean_kld": max(0.0, float(np.mean([each.kld for each in compared]))),
            "same_top": float(np.mean([each.same_top for each in compared])),
            "right": self._num_right(logits),
        }

    def _num_right(self, logits: Logits) -> int:
        """Questions that are answered rightly, greedily, after two that are answered."""
        shots, right = self._tokenizer.encode(_SHOTS), 0
        logits(shots, 0)
        for line in (_HERE / "questions.jsonl").read_text().splitlines():
            asked = json.loads(line)
            ids = self._tokenizer.encode(f"Question: {asked['question']}\nAnswer:", False)
            found, at = list[int](), len(shots)
            for _ in range(_ANSWER):
                row = logits(ids, at)[-1]
                at, ids = at + len(ids), [int(row.argmax())]
                found += ids
            said = self._tokenizer.decode(found).strip().split("\n")[0]
            words = [rf"\b{re.escape(one)}s?\b" for one in asked["answers"]]
            right += any(re.search(word, said, re.IGNORECASE) for word in words)
        return right


def measure(path: Path, num_windows: int, threads: int) -> list[Json]:
    """All rows of one model, float32 first."""
    subject, rows = Subject(path, num_windows), list[Json]()
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "float32"
        write_dequantized(path, wide)
        runs = {"float32": in_hotcold(wide, threads), "as stored": in_hotcold(path, threads)}
        runs |= {dtype: in_hotcold(wide, threads, dtype) for dtype in ("q8", "q4")}
        for kv_dtype in sorted({*KV_DTYPES} - {"float32"}):
            runs[f"float32, KV {kv_dtype}"] = in_hotcold(wide, threads, kv_dtype=kv_dtype)
        if has_thresholds(read_config(path)):
            file = str(Path(folder) / "thresholds.safetensors")
            out = ["--out", str(Path(folder) / "profile.safetensors"), "--thresholds-out", file]
            hotcold("profile", str(path), *out)
            runs["as stored, `threshold`"] = in_hotcold(path, threads, thresholds=file)
        if importlib.util.find_spec("llama_cpp") is not None:
            runs["llama.cpp"] = in_llama_cpp(path, threads)
        for name, run in runs.items():
            with run as logits:
                rows.append({"model": path.stem, "format": name, **subject.scores(logits)})
            progress(str(rows[-1]))
    return rows


@program
@click.argument("models", nargs=-1, required=True, type=EXISTING)
@click.option("--windows", type=click.IntRange(min=1), default=4)
@click.option("--threads", type=click.IntRange(min=1), default=2)
def main(models: tuple[Path, ...], windows: int, threads: int) -> tuple[Json, str]:
    """Measure each of MODELS, GGUF files."""
    rows = [row for path in models for row in measure(path, windows, threads)]
    report = head(models[0], threads) | {"rows": rows}
    asked = len((_HERE / "questions.jsonl").read_text().splitlines())
    columns = ["model", "format", "perplexity", "mean KL", "same top token", f"right of {asked}"]
    lines = [[row["model"], row["format"], f"{row['ppl']:.2f}", f"{row['mean_kld']:.5f}",
              f"{row['same_top']:.1%}", row["right"]] for row in rows]  # fmt: skip
    scored = windows * (_WINDOW - _UNSCORED - 1)
    return report, heading(report, f"{scored} tokens, beside float32") + table(columns, lines)


if __name__ == "__main__":
    main()
