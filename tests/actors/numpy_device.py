"""A device made of NumPy: the GPU service's logic without a GPU.

What is put on the stream is done only when somebody waits for it, so that whoever reads too early
reads something else; memory has an end; launches can be made to fail. Numbers are computed plainly,
from the definitions.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotcold.actors.protocol.stripes import ADD
from hotcold.cuda_kernels.device import DeviceMemoryError
from hotcold.cuda_kernels.matrix import FORMATS, ITEM_BYTES, DeviceMatrix
from hotcold.cuda_kernels.neurons import DeviceLowRank, DevicePredictor
from hotcold.model.config import activations
from hotcold.model.config.layer_spec import RouterSpec
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.norm import RMS_NORM, lane_rms_norm_kernel
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.loops.mailbox import layer_mark
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.sign import SignLayer
from tests.predictor_layers import scores_of
from tests.reference_experts import expert_weights

_ALIGNMENT = 256  # of CuPy's arrays, at least
_OF_ROUTERS = (
    *("num_experts", "num_chosen", "norms_chosen"),
    *("num_groups", "num_chosen_groups"),
)
_ACTIVATION_NAMES = {code: name for name, code in ACTIVATION_CODES.items()}
GARBAGE = 255  # what new memory holds: a NaN in every float format


class LaunchError(RuntimeError):
    """As CUDA's errors: after it the process is of no use."""


def as_floats(matrix: DeviceMatrix) -> np.ndarray:
    """A matrix's weights as float32."""
    data = matrix.content
    if matrix.format not in ITEM_BYTES:
        data = np.ascontiguousarray(data).view(FORMATS[matrix.format])
    return to_float32(data) if data.shape[0] else np.zeros((0, matrix.width), np.float32)


def products(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights.T, each row of x by itself: BLAS would make its bits depend on the others."""
    return np.stack([weights @ row for row in x])


def half_bits(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """x in the format of a KV cache."""
    return x if like.dtype == np.float32 else x.astype(np.float16).view(np.uint16)


def from_half_bits(cache: np.ndarray) -> np.ndarray:
    """A KV cache's items as float32."""
    return cache if cache.dtype == np.float32 else cache.view(np.float16).astype(np.float32)


def activated(function, x: np.ndarray) -> np.ndarray:
    """The function of an FFN, by torch."""
    return _by_rows(activations.activated, function, x)


def activated_up(function, x: np.ndarray) -> np.ndarray:
    """What multiplies it."""
    return _by_rows(activations.activated_up, function, x)


def predictor_layer(predictor: DevicePredictor) -> SignLayer | LowRankLayer:
    """What the driver has for a device's predictor."""
    *arrays, _ = predictor
    if isinstance(predictor, DeviceLowRank):
        return LowRankLayer(*arrays)
    return SignLayer(predictor.bits.view(np.uint64), *arrays[1:])


def _by_rows(torch_function, function, x: np.ndarray) -> np.ndarray:
    """As `products`: torch computes what is left of its vectors of numbers in another way."""
    name, threshold = _ACTIVATION_NAMES[function.code], float(function.threshold)
    rows = [torch.from_numpy(np.ascontiguousarray(row)) for row in x]
    found = [torch_function(name, row, threshold).numpy() for row in rows]
    return np.stack(found) if found else x


class Queue:
    """Work in the order in which it was put there; done when somebody waits for it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._num_done = 0

    @property
    def end(self) -> int:
        """How much was ever put there."""
        return self._num_done + len(self._work)

    def put(self, work: Callable[[], None]) -> None:
        """Add work."""
        self._work.append(work)

    def has_done(self, number: int) -> bool:
        """Whether the first `number` pieces of work are done."""
        return self._num_done >= number

    def drop(self) -> None:
        """Forget what is left."""
        self._num_done = self.end
        self._work.clear()

    def run(self, number: int) -> None:
        """Do the first `number` pieces of work, as far as they are not done."""
        while self._num_done < number:
            work = self._work.popleft()
            self._num_done += 1
            work()


class NumpyKernels:
    """`cuda_kernels.kernels.CudaKernels`; each call is one launch of `device`."""

    def __init__(self, device: NumpyDevice) -> None:
        self._device = device

    def begin(self):
        pass

    def norm(self, layer, x, weight, bias, out, residual=None, reader=None):
        assert x.shape[0] <= 32 and x.shape == out.shape

        def run() -> None:
            found, numbers = x, layer.numbers
            if weight.shape[0] and numbers.norm_kind == RMS_NORM:
                found = np.empty_like(x)
                for row, normed in zip(x, found, strict=True):
                    lane_rms_norm_kernel(row, weight, numbers.norm_eps, normed)
            elif weight.shape[0]:
                centred = x - x.mean(axis=1, keepdims=True)
                scale = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + numbers.norm_eps)
                found = centred * scale * weight + (bias if bias.shape[0] else 0)
            if residual is not None:
                found = residual + layer.numbers.residual_scale * found
            out[:] = found

        self._device.run(run)
        return out

    def norm_parts(self, layer, x, first, last, weight):
        assert x.shape[0] <= 32 and (last - first) % weight.shape[0] == 0

        def run() -> None:
            parts = x[:, first:last].reshape(x.shape[0], -1, weight.shape[0])
            scale = 1 / np.sqrt((parts**2).mean(axis=2, keepdims=True) + layer.numbers.norm_eps)
            x[:, first:last] = (parts * scale * weight).reshape(x.shape[0], -1)

        self._device.run(run)

    def softcap(self, x, cap):
        def run() -> None:
            x[:] = np.float32(cap) * np.tanh(x / np.float32(cap))

        self._device.run(run)

    def gemv(self, weights, bias, x, out, residual=None):
        assert x.shape[0] <= 32 and out.shape == (x.shape[0], weights.num_rows)

        def run() -> None:
            found = products(x, as_floats(weights))
            if bias.shape[0]:
                found = found + bias
            out[:] = found if residual is None else found + residual

        self._device.run(run)

    def rope_store(self, layer, qkv, cache):
        assert qkv.shape[0] <= 32
        keys, values, positions, slots, tables = cache
        num_heads, num_kv_heads = layer.numbers.num_heads, layer.numbers.num_kv_heads
        table = layer.rope_table

        def run() -> None:
            heads = qkv.reshape(qkv.shape[0], -1, keys.shape[3])
            first_value = num_heads + num_kv_heads
            if table.shape[0]:
                cos, sin = (table[positions, part][:, None] for part in (0, 1))
                rotated, half = heads[:, :first_value], table.shape[2]
                a, b = rotated[..., :half].copy(), rotated[..., half : 2 * half].copy()
                rotated[..., :half] = a * cos - b * sin
                rotated[..., half : 2 * half] = b * cos + a * sin
            for t, (position, slot) in enumerate(zip(positions, slots, strict=True)):
                page, row = tables[slot, position // 64], position % 64
                keys[page, :, row] = half_bits(heads[t, num_heads:first_value], keys)
                values[page, :, row] = half_bits(heads[t, first_value:], values)

        self._device.run(run)

    def decode_attention(self, layer, qkv, cache, max_length, scratch, out, reader=None):
        assert qkv.shape[0] <= 32
        keys, values, positions, slots, tables = cache
        numbers, window, softcap = layer.numbers, layer.numbers.window, layer.numbers.softcap
        num_heads, num_kv_heads = numbers.num_heads, numbers.num_kv_heads
        assert scratch.size >= self.attention_scratch_items(32, num_heads, keys.shape[3], 1)

        def run() -> None:
            dim = keys.shape[3]
            heads = qkv.reshape(qkv.shape[0], -1, dim)[:, :num_heads]
            for t, (position, slot) in enumerate(zip(positions, slots, strict=True)):
                length = int(position) + 1
                assert length <= max_length, "the grid would end before the sequence does"
                pages = tables[slot, : -(-length // 64)]
                near = [
                    from_half_bits(cache[pages]).transpose(1, 0, 2, 3)
                    .reshape(num_kv_heads, -1, dim)[:, :length]
                    .repeat(num_heads // num_kv_heads, axis=0)
                    for cache in (keys, values)
                ]  # fmt: skip
                scores = np.einsum("hd,hpd->hp", heads[t], near[0]) * numbers.scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if window:
                    scores[:, : max(0, length - window)] = -np.inf
                if layer.vectors.sinks.shape[0]:
                    scores = np.concatenate([scores, layer.vectors.sinks[:, None]], axis=1)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[t] = np.einsum("hp,hpd->hd", weights[:, :length], near[1]).reshape(-1)

        self._device.run(run)

    def weigh_positions(self, layer, products, positions, first, out):
        numbers, sinks = layer.numbers, layer.vectors.sinks
        group = numbers.num_heads // numbers.num_kv_heads

        def run() -> None:
            places = first + np.arange(products.shape[2])
            rows = np.repeat(positions, group)[:, None]
            unseen = places > rows
            if numbers.window:
                unseen |= places <= rows - numbers.window
            scores = products * numbers.scale
            if numbers.softcap:
                scores = numbers.softcap * np.tanh(scores / numbers.softcap)
            scores = np.where(unseen, -np.inf, scores)
            if sinks.shape[0]:
                own = np.tile(sinks.reshape(-1, 1, group), (1, len(positions), 1)).reshape(
                    *scores.shape[:2], 1
                )
                scores = np.concatenate([scores, own], axis=2)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights = (weights / weights.sum(axis=2, keepdims=True))[..., : len(places)]
            out[:] = half_bits(weights, out)

        self._device.run(run)

    def hot_ffn(
        self, neurons, x, function, thresholds, scratch, out, num_fired, block_weights=None,
        residual=None, masks=None,
    ):  # fmt: skip
        size = neurons.num_neurons
        assert x.shape[0] <= 32
        assert scratch.size >= self.ffn_scratch_items(x.shape[0], size, x.shape[1])

        def linear(matrix, bias):
            return products(x, as_floats(matrix)) + (bias if bias.size else 0)

        def run() -> None:
            h = activated(function, linear(neurons.gate, neurons.gate_bias))
            fires = ~(np.abs(h) <= thresholds.gate)
            if masks is not None:
                fires &= (masks >> np.arange(len(x))[:, None] & 1) != 0
            weights = block_weights
            of_blocks = weights
            if weights is not None:
                starts = neurons.starts if neurons.starts.size else [0, size]
                weights = weights.repeat(np.diff(starts), axis=1)
                fires &= weights != 0
            num_fired[:2] = np.count_nonzero(fires.any(axis=0))
            if neurons.up is not None:
                h = h * activated_up(function, linear(neurons.up, neurons.up_bias))
            if weights is not None:
                h = h * weights
            if neurons.up is not None and thresholds.product >= 0:
                sizes = np.abs(h) * (neurons.down_norms if neurons.down_norms.size else 1)
                fires &= ~(sizes <= thresholds.product)
                num_fired[0] = np.count_nonzero(fires.any(axis=0))
            down = np.ascontiguousarray(as_floats(neurons.down).T)
            found = products(np.where(fires, h, np.float32(0)), down)
            if residual is not None:
                ffn_residual, biases, scale = residual
                bias = np.zeros_like(x)
                for block, own in enumerate(biases if biases.size else ()):
                    factor = np.float32(1) if weights is None else of_blocks[:, block, None]
                    bias = bias + np.where(factor != 0, factor * own, np.float32(0))
                if ffn_residual is None:
                    found = found + bias
                elif scale == 1:
                    found = ffn_residual + found + bias
                else:
                    found = ffn_residual + scale * (found + bias)
                found[~np.isfinite(x)] = np.nan
            out[:] = found

        self._device.run(run)

    def route(self, layer, router, x, ffn_input, scratch, weights):
        num_tokens, numbers = x.shape[0], layer.numbers
        assert num_tokens <= 32
        assert scratch.size >= self.router_scratch_items(num_tokens, numbers.num_experts)
        spec = RouterSpec(
            score=("softmax", "sigmoid", "softmax_of_chosen")[numbers.router_score],
            scale=numbers.router_scale,
            **{name: getattr(numbers, name) for name in _OF_ROUTERS},
        )

        def run() -> None:
            rows = torch.from_numpy(router.rows.data).double()
            biases = [
                torch.from_numpy(each).double() if each.size else None
                for each in (router.bias, router.selection_bias)
            ]
            weights[:] = 0
            for own, token in zip(weights, torch.from_numpy(x).double(), strict=True):
                own[: numbers.num_experts] = expert_weights(
                    spec, rows, biases[0], biases[1], token[None]
                )[0]
            if numbers.num_blocks > numbers.num_experts:
                shared = 1.0
                if router.shared is not None:
                    shared = 1 / (1 + np.exp(-products(ffn_input, router.shared.data)[:, 0]))
                weights[:, numbers.num_experts] = shared

        self._device.run(run)

    def router_scratch_items(self, num_tokens, num_experts):
        return num_tokens * (num_experts + 1)

    def attention_scratch_items(self, num_tokens, num_heads, head_dim, max_length):
        return num_tokens * num_heads * 2

    def ffn_scratch_items(self, num_tokens, num_neurons, width):
        return num_tokens * num_neurons

    def give_input(self, layer, shared, x=None, weights=None):
        def run() -> None:
            if shared.cells[shared.stopped] == shared.told[0]:
                return
            for source, target in ((x, shared.ffn_input), (weights, shared.block_weights)):
                if source is not None:
                    count = min(len(source), len(target))
                    target[:count] = source[:count]
            shared.cells[shared.given] = layer_mark(shared.told[0], layer)

        self._device.run(run)

    def predict(self, predictor, x, num_own, scratch, num_listed):
        def run() -> None:
            layer = predictor_layer(predictor)
            chosen = ~(scores_of(layer, x) <= 0)
            masks = (chosen.T << np.arange(len(x))).sum(axis=1)
            scratch.masks[: masks.size] = masks
            num_listed[0] = np.count_nonzero(masks[:num_own])

        self._device.run(run)

    def list_neurons(self, predictor, scratch, shared):
        def run() -> None:
            number, num_tokens, count = shared.told[:3]
            if shared.cells[shared.stopped] == number:
                return
            masks = scratch.masks & np.uint32((1 << int(num_tokens)) - 1)
            lengths = shared.cells.reshape(-1, shared.cell_words)[:, shared.length]
            for service, begin, end in zip(
                shared.told[3 : 3 + count], predictor.bounds[:-1], predictor.bounds[1:], strict=True
            ):
                ids = np.flatnonzero(masks[begin:end])
                shared.active_ids[service, : ids.size] = ids
                shared.active_masks[service, : ids.size] = masks[begin:end][ids]
                lengths[service] = ids.size

        self._device.run(run)

    def await_outputs(self, layer, shared):
        def run() -> None:
            number, _, count = shared.told[:3].tolist()
            mark, deadline = layer_mark(number, layer), time.monotonic_ns() + shared.limit_ns
            outputs = shared.cells.reshape(-1, shared.cell_words)[:, shared.output]
            while (outputs[shared.told[3 : 3 + count]] != mark).any():
                if shared.cells[shared.stopped] == number:
                    return
                if time.monotonic_ns() > deadline:
                    shared.cells[shared.stopped] = number
                time.sleep(0)

        self._device.run(run)

    def add_outputs(self, shared, own, residual, x, out):
        def run() -> None:
            num_tokens, count = shared.told[1:3]
            rows = np.minimum(np.arange(len(x)), num_tokens - 1)
            more = shared.more_partials.reshape(-1, *shared.partials.shape[1:])
            outputs, kept = [*shared.partials, *more], [] if own is None else [own]
            steps = shared.told[3 + count :]
            for step in steps[1 : 1 + steps[0]]:
                if step == ADD:
                    kept[-2:] = [kept[-2] + kept[-1]]
                else:
                    kept.append(outputs[step][rows])
            ffn_residual, _, scale = residual
            if ffn_residual is None:
                found = sum(kept[1:], kept[0])
            elif scale == 1:
                found = sum(kept, ffn_residual)
            else:
                found = ffn_residual + np.float32(scale) * sum(kept[1:], kept[0])
            out[:] = found + (x - x)

        self._device.run(run)

    def widen(self, weights, first, last, out):
        def run() -> None:
            part = DeviceMatrix(weights.data[first:last], weights.format, weights.width)
            out[:] = as_floats(part).astype(np.float16).view(np.uint16)

        self._device.run(run)


@dataclass
class NumpyDevice:
    """See `actors.attention.cuda.device.Device`. Counts what is held, for as long as it is held."""

    memory_bytes: int = 1 << 40
    context_bytes: int = 0
    refuses_registration: bool = False
    fails_at: Callable[[int], bool] = lambda launch: False  # of the number of the launch
    name: str = "a stand-in"
    make_kernels: Callable[[NumpyDevice], Any] = NumpyKernels
    num_launches: int = 0
    num_copies: int = 0  # between host and device, of steps
    num_waits: int = 0  # of the host

    def __post_init__(self) -> None:
        self.xp: Any = np
        self.kernels = self.make_kernels(self)
        self._held: dict[int, int] = {}
        self._reserved = 0  # as a pool does it, which keeps what was given back
        self._limit = self.memory_bytes
        self._stream, self._copies = Queue(), Queue()
        self._recording: list[Callable[[], None]] | None = None
        self._at_once = False
        self._broken = False
        self.registered: dict[int, int] = {}

    def empty(self, shape, dtype):
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        held = self.held_bytes() + num_bytes
        if held > self._limit or held + self.context_bytes > self.memory_bytes:
            raise DeviceMemoryError(f"out of memory: {num_bytes} more than {self.held_bytes()}")
        memory = np.full(num_bytes + _ALIGNMENT, GARBAGE, np.uint8)
        self._held[id(memory)] = num_bytes
        self._reserved = max(self._reserved, self.held_bytes())
        weakref.finalize(memory, self._held.pop, id(memory))
        first = -memory.ctypes.data % _ALIGNMENT
        return memory[first : first + num_bytes].view(dtype).reshape(shape)

    def held_bytes(self) -> int:
        """Of all arrays that somebody holds."""
        return sum(self._held.values())

    def upload(self, target, source):
        self._finish_all()
        assert target.shape == source.shape and target.dtype == source.dtype
        target[...] = source

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def register(self, address, num_bytes):
        if self.refuses_registration:
            return "operation not supported"
        self.registered[address] = num_bytes
        return ""

    def mapped(self, array):
        assert not array.size or any(
            address <= array.ctypes.data and array.nbytes <= address + size - array.ctypes.data
            for address, size in self.registered.items()
        )
        return array

    def unregister(self, address):
        for queue in (self._stream, self._copies):
            queue.drop()
        del self.registered[address]

    def copy_in(self, target, source):
        assert source.flags.c_contiguous and target.flags.c_contiguous
        assert target.dtype == source.dtype and target.size == source.size
        self.num_copies += 1
        self._put(lambda: np.copyto(target, source.reshape(target.shape)))

    def copy_out(self, target, source):
        assert target.shape == source.shape and target.dtype == source.dtype, (
            target.shape, source.shape,
        )  # fmt: skip
        self.num_copies += 1
        self._put(lambda: np.copyto(target, source))

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Functions of NumPy run at once, so all that was put there before comes first."""
        assert self._recording is None
        was, self._at_once = self._at_once, True
        self._finish_all()
        try:
            yield
        finally:
            self._at_once = was

    def capture(self, work):
        self._recording = []
        try:
            work()
            return self._recording
        finally:
            self._recording = None

    def launch(self, graph):
        for part in graph:
            self._put(part)

    def run(self, kernel: Callable[[], None]) -> None:
        """A kernel's launch."""
        if self._recording is not None:
            self._recording.append(lambda: self._launched(kernel))
        else:
            self._put(lambda: self._launched(kernel))

    def _launched(self, kernel: Callable[[], None]) -> None:
        self.num_launches += 1
        self._broken |= self.fails_at(self.num_launches)
        if self._broken:
            raise LaunchError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        kernel()

    def _put(self, work: Callable[[], None]) -> None:
        assert self._recording is None, "a graph of the service holds kernels only"
        if self._at_once:
            work()
        else:
            self._stream.put(work)

    def record(self, *, spin):
        return self._stream, self._stream.end

    def wait(self, event):
        self.num_waits += 1
        queue, number = event
        queue.run(number)

    def _finish_all(self) -> None:
        for queue in (self._stream, self._copies):
            queue.run(queue.end)

    def record_copies(self):
        return self._copies, self._copies.end

    def copy_ahead(self, target, source):
        assert source.flags.c_contiguous and target.size == source.size
        self._copies.put(lambda: np.copyto(target, source.reshape(target.shape)))

    def follow_copies(self):
        number = self._copies.end
        self._put(lambda: self._copies.run(number))

    def hold_copies(self, event):
        queue, number = event
        self._copies.put(lambda: queue.run(number))

    def multiply(self, a, b, out, *, b_has_rows, add):
        assert self._at_once and a.dtype == b.dtype
        wide = [self._wide(x) for x in (a, b)]
        found = wide[0] @ (wide[1].swapaxes(-1, -2) if b_has_rows else wide[1])
        out[...] = out + found if add else found

    @staticmethod
    def _wide(x: np.ndarray) -> np.ndarray:
        return x if x.dtype == np.float32 else to_float32(np.ascontiguousarray(x))

    def narrow(self, x, dtype):
        if dtype == np.float32:
            return x
        if dtype == np.uint16:
            with np.errstate(over="ignore"):
                return x.astype(np.float16).view(np.uint16)
        return torch.from_numpy(np.array(x)).to(torch.bfloat16).view(torch.int16).numpy()

    def activate(self, function, gates, factors):
        up = 1 if factors is None else activated_up(function, factors)
        gates[...] = activated(function, gates) * up

    def mark(self):
        self._put(lambda: None)
        return self._stream.end

    def elapsed_ms(self, first, last):
        assert self._stream.has_done(last), "the event has not come"
        return float(last - first)

    def used_bytes(self):
        return self.context_bytes + self._reserved

    def free_bytes(self):
        return self.memory_bytes - self.used_bytes()

    def limit(self, num_bytes):
        self._limit = num_bytes

    def release(self):
        self._finish_all()
        self._reserved = self.held_bytes()

    def explain(self, error):
        return str(error) if isinstance(error, LaunchError) else ""
