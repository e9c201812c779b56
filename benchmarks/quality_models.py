"""Real models in several formats, all in one process, and how their logits are scored.

Shared by `quality.py` and `gguf_quality.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.runs import Json
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.scoring import scored_rows
from hotcold.model.config.build import config_values
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hotcold.numba_kernels.decode.scoring import compare_logits
from hotcold.numba_kernels.load.convert import to_float32
from tests.actors.in_process import InProcessSystem

_MAX_TOKENS = 256


def write_dequantized(source: Path, folder: Path, dtype: str) -> Path:
    """Write a GGUF file's weights, as ggml dequantizes them, as float32 or float16 safetensors."""
    folder.mkdir(parents=True)
    values, _ = config_values(source)
    (folder / "config.json").write_text(json.dumps({**values, "torch_dtype": dtype}))
    checkpoint = Checkpoint(source)
    names = checkpoint.names()
    arrays = {name: to_float32(np.ascontiguousarray(checkpoint.array(name))) for name in names}
    specs = [TensorSpec(name, arrays[name].shape) for name in names]
    with SafetensorsWriter(folder, specs, dtype) as writer:  # type: ignore[arg-type]
        for name in names:
            writer.write(name, torch.from_numpy(arrays[name]))
    return folder


@contextmanager
def running(path: Path, weight_dtype: str, window: int, threads: int) -> Iterator[InProcessSystem]:
    """A system on this process's threads, with a float32 KV cache of one window."""
    with InProcessSystem(
        path,
        num_threads=threads,
        num_positions=window,
        max_tokens=_MAX_TOKENS,
        weight_dtype=weight_dtype,
        has_down_norms=True,
    ) as system:
        yield system


def window_logits(engine: Engine, windows: list[list[int]], first: int) -> Iterator[np.ndarray]:
    """Logits (V,) after each of the tokens first.. but the last of each window, by kernels."""
    for ids in windows:
        for _, row in scored_rows(engine, engine.mode, ids, first):
            yield row


def scores(
    references: Iterable[np.ndarray], rows: Iterable[np.ndarray], targets: Iterable[int]
) -> Json:
    """ppl, mean_kld and same_top of logits (V,) beside float32's, position by position.

    `targets` are the tokens that follow. ppl = exp(mean nll); KL divergence is in nats.
    """
    compared = [
        compare_logits(reference, row, target)
        for reference, row, target in zip(references, rows, targets, strict=True)
    ]
    return {
        "ppl": float(np.exp(np.mean([each.nll for each in compared]))),
        "mean_kld": max(0.0, float(np.mean([each.kld for each in compared]))),
        "same_top": float(np.mean([each.same_top for each in compared])),
    }


def targets(windows: Iterable[list[int]], first: int) -> list[int]:
    """The tokens that `window_logits` are to find."""
    return [token for ids in windows for token in ids[first + 1 :]]


def bytes_shares(engine: Engine, ids: list[int]) -> tuple[float, float, float]:
    """Shares of gate, up and down rows that a token reads, one token at a time."""
    before = engine.times.num_gates, engine.times.num_ups, engine.times.num_neurons
    for at, token in enumerate(ids):
        engine.step([token], [at], [0], num_logits=0)
    after = engine.times.num_gates, engine.times.num_ups, engine.times.num_neurons
    all_rows = engine.config.num_neurons * len(ids)
    gates, ups, downs = ((b - a) / all_rows for a, b in zip(before, after, strict=True))
    return gates, ups, downs
