"""Layers that a GPU holds as a whole, one request a layer and one for all, in turn in one process.

    python -m benchmarks.gpu_whole_layers MODEL [--dtype q4] [--batch 8] [--tokens 48] [--rounds 5]

MODEL is a folder of `hotcold make-model` that the GPU holds whole. Prints one JSON object a mode:
ms a step (medians of rounds), tokens a second, and whether the logits have the same bits.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.frame import Json
from hotcold.actors.attention.cuda.fit import open_device
from hotcold.actors.driver.engine import Engine
from tests.actors.cuda_in_process import CudaInProcess
from tests.actors.test_cuda_whole_layers import every_layer

_SEED = 0
_NAMES = {False: "a request a layer", True: "one request"}


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--dtype", default="", help="Of quantized weights.")
@click.option("--batch", default=1, show_default=True)
@click.option("--tokens", default=48, show_default=True, help="Of each sequence; at most 128.")
@click.option("--rounds", default=5, show_default=True)
def main(model: Path, dtype: str, batch: int, tokens: int, rounds: int) -> None:
    """Measure both ways in `exact` and `dense`."""
    options: dict[str, Any] = {"kv_dtype": "float16", "weight_dtype": dtype, "num_slots": batch}
    with CudaInProcess(
        model, 1, 1, hot=every_layer, device=open_device(), **options
    ) as system:  # fmt: skip
        shape = tokens, batch
        ids = np.random.default_rng(_SEED).integers(0, system.config.vocab_size, shape).tolist()
        for mode in ("exact", "dense"):
            engines = {joins: system.engine(mode) for joins in _NAMES}
            last, found = {}, {joins: list[float]() for joins in _NAMES}
            for joins, engine in engines.items():
                engine.joins_layers = joins
                for _ in range(2):  # graphs are made the second time
                    _, last[joins] = _run(engine, ids)
            for _ in range(rounds):
                for joins, engine in engines.items():
                    found[joins].append(_run(engine, ids)[0])
            report: Json = {"mode": mode, "same_bits": bool((last[False] == last[True]).all())}
            for joins, name in _NAMES.items():
                ms = [round(each, 3) for each in found[joins]]
                per_s = round(1e3 * batch / median(ms), 1)
                report[name] = {"ms_a_step": ms, "tokens_per_s": per_s}
            click.echo(json.dumps(report))


def _run(engine: Engine, ids: list[list[int]]) -> tuple[float, np.ndarray]:
    """The median ms of a step, and the last step's logits."""
    took, batch = [], len(ids[0])
    for at, tokens in enumerate(ids):
        started = time.perf_counter()
        found = engine.step(tokens, [at] * batch, list(range(batch)), batch)
        took.append(1e3 * (time.perf_counter() - started))
    return median(took), found.copy()


if __name__ == "__main__":
    main()
