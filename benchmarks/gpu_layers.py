"""A GPU's layers asked for one by one, and as one request and graph, in turn in one process.

    python -m benchmarks.gpu_layers MODEL [--hot 0.3 --hot 1] [--services 1] [--threads 14]
                                    [--dtype q4] [--batch 8] [--tokens 48] [--rounds 5] [--out FILE]

The GPU holds the share `--hot` of the neurons, the CPU the others. Where MODEL is not there it is
made: 4 layers of falcon-40b's shape, 5% firing. For each share and mode: ms a step (medians of
rounds), tokens a second, and whether the logits have the same bits. First what the flags of a
shared layer take, there and back, where nobody computes anything.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import click
import numpy as np

from benchmarks.frame import Json, hotcold
from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.fit import open_device
from hotcold.actors.attention.cuda.link import Link
from hotcold.actors.attention.cuda.shared import SharedLayers
from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.mailbox import await_input, give_output
from tests.actors.cuda_in_process import CudaInProcess

_SEED = 0
_NAMES = {False: "layer by layer", True: "one request"}
_SHAPE = ("--shape", "falcon-40b-like", "--layers", "4", "--vocab", "8192", "--density", "0.05")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--hot", "shares", multiple=True, default=[1.0], type=float, help="On the GPU.")
@click.option("--services", default=1, show_default=True, help="On the CPU.")
@click.option("--threads", default=1, show_default=True, help="Of each of these.")
@click.option("--dtype", default="", help="Of quantized weights.")
@click.option("--batch", default=1, show_default=True)
@click.option("--tokens", default=48, show_default=True, help="Of each sequence; at most 128.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file, else it is printed.")
def main(
    model: Path, shares: tuple[float, ...], services: int, threads: int, dtype: str, batch: int,
    tokens: int, rounds: int, out: Path | None,
) -> None:  # fmt: skip
    """Measure both ways in `exact` and `dense`."""
    if not model.exists():
        hotcold("make-model", str(model), *_SHAPE, "--dtype", "f16")
    options: dict[str, Any] = {"kv_dtype": "float16", "weight_dtype": dtype, "num_slots": batch}
    reports: list[Json] = [{"us_a_layer_of_flags": round(flags_us(open_device()), 2)}]
    for share in shares:
        with CudaInProcess(
            model, services, threads, hot=_share_of_each(share), device=open_device(), **options
        ) as system:
            reports += [{"hot": share} | each for each in _modes(system, batch, tokens, rounds)]
    text = json.dumps(reports, indent=1)
    click.echo(text) if out is None else out.write_text(text)


def flags_us(device: Device, num_layers: int = 200) -> float:
    """Microseconds of a layer's flags between a graph and a CPU thread, the fastest round's."""
    layout = ArenaLayout(2, 1, 8, 8, 8, 1, 1, 1, num_layers)
    arena = layout.new_arena()
    buffers, link, shared = layout.buffers(arena), Link(device, arena), SharedLayers(device)
    shared.attach(buffers, 0, link)
    buffers.sum_order[:2] = 1, 1  # one service, the second
    memory, x, took = shared.memory, device.empty((1, 8), np.float32), []
    if memory is None:
        raise click.ClickException(f"no memory is shared: {link.refusal}")

    def layers() -> None:
        for layer in range(num_layers):
            device.kernels.give_input(layer, memory, x)
            device.kernels.await_outputs(layer, memory)

    graph: Any = None
    for number in range(2, 12):
        other = Thread(target=_answer, args=(buffers.cells, np.int32(number), num_layers))
        other.start()
        shared.tell(number, 1)
        if graph is None:  # kernels are compiled
            with device.stream():
                layers()
            graph = device.capture(layers)
        else:
            first = device.mark()
            device.launch(graph)
            last = device.mark()
            device.wait(device.record(spin=True))
            took.append(1e3 * device.elapsed_ms(first, last) / num_layers)
        other.join()
    link.close()
    return min(took)


@njit(nogil=True, cache=True)
def _answer(cells, number, num_layers):  # type: ignore[no-untyped-def]
    for layer in range(num_layers):
        await_input(cells, 1, 0, number, layer, 0)
        give_output(cells, 1, number, layer, 1)


def _share_of_each(share: float) -> Any:
    def hot(num_layers: int, ffn_size: int) -> list[np.ndarray]:
        return [np.arange(round(share * ffn_size), dtype=np.int32)] * num_layers

    return hot


def _modes(system: CudaInProcess, batch: int, tokens: int, rounds: int) -> list[Json]:
    """A report of each mode."""
    random, found = np.random.default_rng(_SEED), []
    ids = random.integers(0, system.config.vocab_size, (tokens, batch)).tolist()
    for mode in ("exact", "dense"):
        engines = {joins: system.engine(mode) for joins in _NAMES}
        last, took = {}, {joins: list[float]() for joins in _NAMES}
        for joins, engine in engines.items():
            engine.joins_layers = joins
            for _ in range(2):  # graphs are made the second time
                _, last[joins] = _run(engine, ids)
        for _ in range(rounds):
            for joins, engine in engines.items():
                took[joins].append(_run(engine, ids)[0])
        report: Json = {"mode": mode, "same_bits": bool((last[False] == last[True]).all())}
        for joins, name in _NAMES.items():
            ms = [round(each, 3) for each in took[joins]]
            per_s = round(1e3 * batch / median(ms), 1)
            report[name] = {"ms_a_step": ms, "tokens_per_s": per_s}
        found.append(report)
    return found


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
