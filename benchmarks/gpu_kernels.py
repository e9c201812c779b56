"""The GPU kernels' speed, as a share of what a copy within the same GPU's memory reaches.

python -m benchmarks.gpu_kernels --out gpu-kernels.json

The hot FFN, products of rows with vectors, and decode attention. Each figure is the time of a
CUDA graph that runs a kernel over several layers, as many as hold 1 GiB, each with vectors of its
own: so no weight is found in a cache, and every run has other neurons that fire. Bytes are those
that must be read: gate rows, and for each neuron that fires for any token its up and down rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import click
import numpy as np

from hotcold.cuda_kernels.device import list_gpus
from hotcold.cuda_kernels.kernels import CudaKernels, Layer, PagedCache
from hotcold.cuda_kernels.launch import cupy_copies
from hotcold.cuda_kernels.matrix import FORMATS, DeviceMatrix, row_bytes
from hotcold.cuda_kernels.neurons import DeviceNeurons
from hotcold.cuda_kernels.timing import graph_seconds, measure_gpu_bandwidth
from hotcold.numba_kernels.decode.activations import activation, not_zero
from hotcold.numba_kernels.formats import ROW_FORMATS
from hotcold.numba_kernels.layer_record import LAYER_NUMBERS, LayerVectors
from tests.kernels.quantized_rows import random_rows

_RELU, _FIRES = activation("relu"), not_zero("relu")
_LAYER_SHAPES = ((4096, 11008), (8192, 28672))  # width, neurons
_MIN_BYTES = 1 << 30
_RANDOM_ROWS = 1021  # repeated; a prime, so that blocks of rows differ
_PAGE = 64
_HEAD_DIM = 128


@dataclass(frozen=True)
class Figure:
    """One kernel over one shape."""

    kernel: str
    format: str
    shape: str
    num_tokens: int
    us: float
    gb_per_s: float
    share_of_copy: float
    fired_share: float | None = None  # of the neurons, for any of the tokens


@click.command(context_settings={"show_default": True})
@click.option("--out", "path", type=click.Path(path_type=Path), help="Write the report here too.")
@click.option("--formats", default=",".join(FORMATS))
@click.option("--batches", default="1,4,32")
@click.option("--density", default=0.3, help="Of neurons, for one token.")
@click.option("--lengths", default="512,4096", help="Of sequences.")
def main(path: Path | None, formats: str, batches: str, density: float, lengths: str) -> None:
    """Print one line a figure, and last a report as one JSON object."""
    gpus, reason = list_gpus()
    if not gpus:
        raise click.ClickException(f"no GPU can be measured: {reason}")
    copy = measure_gpu_bandwidth(gpus[0].device_id).read_gb_per_s
    bench = Bench(CudaKernels(), cupy_copies()[0], cupy_copies()[1], copy)
    report: dict[str, Any] = {
        "device": gpus[0].name,
        "compute_capability": list(gpus[0].compute_capability),
        "copy_gb_per_s": round(copy, 1),
        "figures": [],
    }
    tokens = [int(word) for word in batches.split(",")]
    for figure in bench.figures(formats.split(","), tokens, density, lengths.split(",")):
        click.echo(
            f"{figure.kernel:9} {figure.format:4} {figure.shape:18} {figure.num_tokens:2} tokens "
            f"{figure.us:9.1f} µs {figure.gb_per_s:7.0f} GB/s  {figure.share_of_copy:.2f} of a copy"
        )
        report["figures"].append(asdict(figure))
        if path:
            path.write_text(json.dumps(report) + "\n")
    click.echo(json.dumps(report))


@dataclass(frozen=True)
class Bench:
    """Kernels, how arrays get to the device and back, and GB/s of a copy."""

    kernels: CudaKernels
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    copy_gb_per_s: float

    def figures(
        self, formats: list[str], batches: list[int], density: float, lengths: list[str]
    ) -> Iterator[Figure]:
        """All of them, one shape's weights on the device at a time."""
        for width, height in _LAYER_SHAPES:
            for weight_format in formats:
                size = row_bytes(weight_format, width) * height
                kinds = weight_format, weight_format, _summed(weight_format)
                matrices = [
                    self._matrix(seed, kinds[seed % 3], height, width)
                    for seed in range(3 * -(-_MIN_BYTES // (3 * size)))
                ]
                for num_tokens in batches:
                    yield self._rows([m for m in matrices if m.format == kinds[0]], num_tokens)
                    yield self._ffn(matrices, num_tokens, density)
                del matrices
            for length in map(int, lengths):
                for group in (1, 8):
                    for num_tokens in batches:
                        yield self._attention(width // _HEAD_DIM, group, length, num_tokens)

    def _matrix(self, seed: int, weight_format: str, height: int, width: int) -> DeviceMatrix:
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((_RANDOM_ROWS, width), np.float32) * np.float32(0.02)
        if weight_format == "f16":
            values = values.astype(np.float16).view(np.uint16)
        elif weight_format == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.int16)
        elif weight_format != "f32":
            values = random_rows(seed, weight_format, _RANDOM_ROWS, width).rows.view(np.uint8)
        rows = np.resize(values, (height, values.shape[1]))
        return DeviceMatrix(self.to_device(rows), weight_format, width)

    def _vectors(self, count: int, num_tokens: int, width: int) -> list[Any]:
        rng = np.random.default_rng(1)
        return [
            self.to_device(rng.standard_normal((num_tokens, width), np.float32))
            for _ in range(count)
        ]

    def _figure(
        self, kernel: str, kind: str, shape: str, num_tokens: int, seconds: float, num_bytes: float
    ) -> Figure:
        speed = num_bytes / seconds / 1e9
        share = round(speed / self.copy_gb_per_s, 3)
        return Figure(
            kernel, kind, shape, num_tokens, round(seconds * 1e6, 1), round(speed, 1), share
        )

    def _rows(self, matrices: list[DeviceMatrix], num_tokens: int) -> Figure:
        first = matrices[0]
        xs = self._vectors(len(matrices), num_tokens, first.width)
        out = self.to_device(np.empty((num_tokens, first.num_rows), np.float32))

        def work() -> None:
            for matrix, x in zip(matrices, xs, strict=True):
                self.kernels.gemv(matrix, None, x, out)

        seconds = graph_seconds(work) / len(matrices)
        num_bytes = first.num_rows * first.row_bytes
        shape = f"{first.width}x{first.num_rows}"
        return self._figure("rows", first.format, shape, num_tokens, seconds, num_bytes)

    def _ffn(self, matrices: list[DeviceMatrix], num_tokens: int, density: float) -> Figure:
        first, num_layers = matrices[0], len(matrices) // 3
        height, width = first.num_rows, first.width
        xs = self._vectors(num_layers, num_tokens, width)
        out = self.to_device(np.empty((num_tokens, width), np.float32))
        items = self.kernels.ffn_scratch_items(num_tokens, height, width)
        scratch = self.to_device(np.empty(items, np.float32))
        counts = self.to_device(np.zeros((num_layers, 2), np.int32))  # who fires; whose up is read
        none = self.to_device(np.empty(0, np.float32))
        bias = self.to_device(np.full(height, self._bias_for(first, density), np.float32))

        layers = [
            DeviceNeurons(gate, bias, up, none, down, none, none)
            for gate, up, down in zip(matrices[0::3], matrices[1::3], matrices[2::3], strict=True)
        ]

        def work() -> None:
            for layer, x in enumerate(xs):
                self.kernels.hot_ffn(layers[layer], x, _RELU, _FIRES, scratch, out, counts[layer])

        seconds = graph_seconds(work) / num_layers
        num_fired = float(self.to_host(counts)[:, 0].mean())
        num_bytes = (height + num_fired) * first.row_bytes + num_fired * matrices[2].row_bytes
        shape = f"{width}x{height}"
        found = self._figure("hot_ffn", first.format, shape, num_tokens, seconds, num_bytes)
        return Figure(**{**asdict(found), "fired_share": round(num_fired / height, 3)})

    def _bias_for(self, gate: DeviceMatrix, density: float) -> float:
        """The gate bias with which a normal vector lets such a share of the neurons fire."""
        x, count = self._vectors(1, 1, gate.width)[0], gate.num_rows
        out = self.to_device(np.empty((1, count), np.float32))
        self.kernels.gemv(gate, None, x, out)
        return float(NormalDist().inv_cdf(density) * self.to_host(out).std())

    def _attention(self, num_heads: int, group: int, length: int, num_tokens: int) -> Figure:
        kv_heads, pages_a_slot = num_heads // group, -(-length // _PAGE)
        pages = num_tokens * pages_a_slot
        cache_bytes = 2 * num_tokens * length * kv_heads * _HEAD_DIM * 2
        num_layers = max(1, -(-_MIN_BYTES // cache_bytes))
        rng = np.random.default_rng(2)
        shape = (num_layers, pages, kv_heads, _PAGE, _HEAD_DIM)
        page = rng.standard_normal(shape[2:], np.float32).astype(np.float16).view(np.uint16)
        keys, values = (self.to_device(np.resize(page, shape)) for _ in range(2))
        rows = (num_heads + 2 * kv_heads) * _HEAD_DIM
        qkv = self._vectors(1, num_tokens, rows)[0]
        places = [
            self.to_device(array.astype(np.int32))
            for array in (
                np.full(num_tokens, length - 1),
                np.arange(num_tokens),
                rng.permutation(pages).reshape(num_tokens, -1),
            )
        ]
        items = self.kernels.attention_scratch_items(num_tokens, num_heads, _HEAD_DIM, length)
        scratch = self.to_device(np.empty(items, np.float32))
        out = self.to_device(np.empty((num_tokens, num_heads * _HEAD_DIM), np.float32))

        numbers = np.zeros(1, LAYER_NUMBERS)[0]
        numbers.num_heads, numbers.num_kv_heads = num_heads, kv_heads
        numbers.head_dim, numbers.scale = _HEAD_DIM, _HEAD_DIM**-0.5
        none = self.to_device(np.empty(0, np.float32))
        own = Layer.of(numbers, LayerVectors(*[none] * len(LayerVectors._fields)), none)

        def work() -> None:
            for layer in range(num_layers):
                cache = PagedCache(keys[layer], values[layer], *places)
                self.kernels.decode_attention(own, qkv, cache, length, scratch, out)

        seconds = graph_seconds(work) / num_layers
        name = f"{num_heads}/{kv_heads} heads, {length}"
        return self._figure("attention", "f16", name, num_tokens, seconds, cache_bytes)


def _summed(weight_format: str) -> str:
    """What down rows of the format are on a device."""
    row_format = ROW_FORMATS.get(FORMATS[weight_format])
    return weight_format if row_format is None else row_format.summed_as or weight_format


if __name__ == "__main__":
    main()
