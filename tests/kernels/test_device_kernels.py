"""A device's kernels as the service calls them: steps of several tokens, over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.kernels import Layer, PagedCache
from hotcold.cuda_kernels.matrix import DeviceMatrix, row_bytes
from hotcold.cuda_kernels.neurons import LayerResidual
from hotcold.cuda_kernels.sizes import FfnLayout, ffn_scratch_items, has_whole_pieces
from hotcold.numba_kernels.decode.activations import activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING
from hotcold.numba_kernels.ffn.in_memory import set_bias
from hotcold.numba_kernels.formats import QUANTIZED
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.serve.layer_loop import merge_normed, merge_partials
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.device_calls import DeviceCalls, device_matrix
from tests.kernels.layer_numbers import device_layer
from tests.kernels.quantized_rows import IN_BLOCKS, IN_LAYERS, KINDS, SUMMED, random_matrix

pytestmark = pytest.mark.sweep(kind=["f32", "f16", "q8", "q4"])

PAGE = 64
RELU = activation("relu")


@dataclass(frozen=True)
class Step:
    """Tokens of several sequences, whose keys and values stand in a paged cache."""

    qkv: np.ndarray
    num_heads: int
    num_kv_heads: int
    table: np.ndarray  # rope
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    cache: np.ndarray  # (2, pages, KV, 64, dim)
    sinks: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.positions, self.slots, self.page_tables

    def layer(self, put: Callable[[np.ndarray], Any], table: np.ndarray) -> Layer:
        """With `table` as its rope."""
        dim = self.cache.shape[-1]
        facts: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        vectors = {"sinks": self.sinks}
        return device_layer(put, table, vectors, head_dim=dim, scale=dim**-0.5, **facts)

    def token(self, t: int) -> Step:
        """The step of one token alone."""
        rows = slice(t, t + 1)
        places = self.positions[rows], self.slots[rows], self.page_tables
        counts = self.num_heads, self.num_kv_heads
        return Step(self.qkv[rows], *counts, self.table, *places, self.cache, self.sinks)

    def run(self, device: DeviceCalls, max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """The heads' outputs, and the cache afterwards."""
        kernels, put = device.kernels, device.to_device
        qkv, cache = put(self.qkv), PagedCache(*map(put, (*self.cache, *self.places)))
        layer = self.layer(put, self.table)
        kernels.rope_store(layer, qkv, cache)
        dim, num_tokens = self.cache.shape[-1], len(self.qkv)
        items = kernels.attention_scratch_items(num_tokens, self.num_heads, dim, max_length)
        scratch = put(np.full(items, np.nan, np.float32))
        out = put(np.empty((num_tokens, self.num_heads * dim), np.float32))
        kernels.decode_attention(layer, qkv, cache, max_length, scratch, out)
        return device.to_host(out), np.stack([device.to_host(part) for part in cache[:2]])


def make_step(dtype: type, heads: tuple[int, int], dim: int, positions: list[int]) -> Step:
    """Two tokens of slot 0, one after the other, the others of slots of their own."""
    num_heads, num_kv_heads = heads
    num_slots, pages_a_slot = len(positions) - 1, max(positions) // PAGE + 1
    pages = np.random.default_rng(1).permutation(num_slots * pages_a_slot + 1)[1:]
    cache = random_bits(2, dtype, 2, pages.size + 1, num_kv_heads, PAGE, dim)
    return Step(
        qkv=random_floats(3, len(positions), (num_heads + 2 * num_kv_heads) * dim),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        table=random_floats(4, max(positions) + 1, 2, dim // 2),
        positions=np.array(positions, np.int32),
        slots=np.array([0, *range(num_slots)], np.int32),
        page_tables=pages.reshape(num_slots, pages_a_slot).astype(np.int32),
        cache=cache,
    )


def expected_step(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """What `Step.run` must give."""
    cache, dim = step.cache.copy(), step.cache.shape[-1]
    heads = step.qkv.reshape(len(step.qkv), -1, dim).astype(np.float64)
    first_value = step.num_heads + step.num_kv_heads
    for t, position in enumerate(step.positions):
        heads[t, :first_value] = reference.rope(heads[t, :first_value], step.table[position])
        page = step.page_tables[step.slots[t], position // PAGE]
        for part, first in enumerate((step.num_heads, first_value)):
            own = heads[t, first : first + step.num_kv_heads].astype(np.float32)
            cache[part, page, :, position % PAGE] = reference.narrowed(own, cache.dtype.type)
    out = np.empty((len(heads), step.num_heads * dim))
    for t, position in enumerate(step.positions):
        pages = cache[:, step.page_tables[step.slots[t]]].transpose(0, 2, 1, 3, 4)
        keys, values = pages.reshape(2, step.num_kv_heads, -1, dim)
        queries = heads[t, : step.num_heads]
        found = reference.decode_attention(queries, keys, values, position + 1)
        out[t] = found.reshape(-1)
    return out, cache


SHAPES = [((8, 8), 64), ((8, 2), 128), ((6, 1), 20), ((16, 1), 256), ((2, 1), 8)]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim"), SHAPES, ids=str)
def test_attention_step(device: DeviceCalls, dtype: type, heads: tuple[int, int], dim: int) -> None:
    step = make_step(dtype, heads, dim, [199, 200, 0, 127, 128, 300])
    found, cache = step.run(device, 301)
    expected, expected_cache = expected_step(step)
    tolerance = 2e-5 if dtype is np.float32 else 2e-3  # a key may round to the next float16
    np.testing.assert_allclose(found, expected, atol=tolerance)
    np.testing.assert_allclose(
        reference.widened(cache), reference.widened(expected_cache), rtol=1e-3, atol=1e-3
    )
    changed = (cache != step.cache).any(axis=-1).sum()
    assert changed == 2 * len(step.qkv) * step.num_kv_heads
    for t in range(2, 6):  # alone, and where the grid allows for longer sequences
        alone, _ = step.token(t).run(device, 301 if t == 5 else 1000)
        assert (alone[0] == found[t]).all()


@pytest.mark.parametrize("size", [1, 200])
def test_sinks_join_the_softmax(device: DeviceCalls, size: float) -> None:
    """A head's output is as if another position with a value of zeros had its logit; sinks may be
    larger than any score, or so large that nothing else is left.
    """
    step = make_step(np.float32, (4, 2), 20, [199, 200, 0, 300])
    sinks = np.array([-1, 0.5, 1, -np.inf], np.float32) * np.float32(size)
    plain, _ = step.run(device, 301)
    found, _ = replace(step, sinks=sinks).run(device, 301)
    expected, share = expected_step(step)[0].reshape(4, 4, 20), np.empty((4, 4, 1))
    for t in range(len(step.qkv)):
        for head, sink in enumerate(sinks.astype(np.float64)):
            total = np.exp(scores_of(step, t, head)).sum()
            share[t, head] = total / (total + np.exp(sink))
    np.testing.assert_allclose(found, (expected * share).reshape(4, -1), atol=2e-5)
    assert (found.reshape(4, 4, 20)[:, 3] == plain.reshape(4, 4, 20)[:, 3]).all()


def scores_of(step: Step, t: int, head: int) -> np.ndarray:
    """Float64 scores of a token's head, over all its positions."""
    cache, dim = expected_step(step)[1], step.cache.shape[-1]
    keys = cache[0][step.page_tables[step.slots[t]], head * step.num_kv_heads // step.num_heads]
    query = step.qkv[t].reshape(-1, dim)[head : head + 1].astype(np.float64)
    query = reference.rope(query, step.table[step.positions[t]])[0]
    found: np.ndarray = keys.reshape(-1, dim)[: step.positions[t] + 1] @ query * dim**-0.5
    return found


def test_a_sequence_of_more_splits_than_a_block_has_threads(device: DeviceCalls) -> None:
    step = make_step(np.float32, (2, 1), 8, [20_000, 20_001])
    found, _ = step.run(device, 20_002)
    np.testing.assert_allclose(found, expected_step(step)[0], atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["f32", "f16"])
def test_without_rope_only_the_cache_changes(device: DeviceCalls, dtype: type) -> None:
    step = make_step(dtype, (4, 2), 6, [5, 6, 70])
    qkv, put = device.to_device(step.qkv), device.to_device
    cache = PagedCache(*map(put, (*step.cache, *step.places)))
    layer = step.layer(put, np.empty((0, 2, 0), np.float32))
    device.kernels.rope_store(layer, qkv, cache)
    assert (device.to_host(qkv) == step.qkv).all()
    heads = reference.narrowed(step.qkv.reshape(3, 8, 6), dtype)
    for t, position in enumerate(step.positions):
        page = step.page_tables[step.slots[t], position // PAGE]
        for part, first in ((0, 4), (1, 6)):
            found = device.to_host(cache[part])[page, :, position % PAGE]
            assert (found == heads[t, first : first + 2]).all()


def test_what_float16_cannot_hold_becomes_a_nan_in_the_cache(device: DeviceCalls) -> None:
    """An infinite key may have a score of minus infinity, and nobody would see it."""
    step = make_step(np.uint16, (4, 2), 6, [5, 6, 70])
    step.qkv[:, 24:30] = [65504, 65519.9, 65520, -1e6, np.inf, -65504]  # the first key
    qkv, put = device.to_device(step.qkv), device.to_device
    cache = PagedCache(*map(put, (*step.cache, *step.places)))
    device.kernels.rope_store(step.layer(put, np.empty((0, 2, 0), np.float32)), qkv, cache)
    page = step.page_tables[step.slots[0], 0]
    found = device.to_host(cache.keys)[page, 0, 5].view(np.float16)
    np.testing.assert_array_equal(found, [65504, 65504, np.nan, np.nan, np.nan, -65504])


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_residual_in_place(device: DeviceCalls, kind: str, num_tokens: int) -> None:
    rows, weights = random_matrix(1, kind, 37, 264)
    x, bias = random_floats(2, num_tokens, 264), random_floats(3, 37)
    residual = random_floats(4, num_tokens, 37)
    out = device.to_device(residual)
    matrix = device_matrix(rows, device.to_device)
    put = device.to_device
    device.kernels.gemv(matrix, put(bias), put(x), out, out)
    np.testing.assert_allclose(device.to_host(out), x @ weights.T + bias + residual, atol=1e-4)


@pytest.mark.sweep(kind=["f32", "q4", "q6", "mxfp4"])
@pytest.mark.parametrize("kind", [*BITS, *KINDS])
def test_pieces_that_are_not_aligned_give_the_same_bits(device: DeviceCalls, kind: str) -> None:
    """Also rows that are padded, beside those with nothing between them."""
    width = 1280
    rows, _ = random_matrix(5, kind, 21, width)
    x = random_floats(6, 5, width)
    aligned = device_matrix(rows, device.to_device)
    assert has_whole_pieces(aligned, device.kernels._at(aligned.data))
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    buffer = device.to_device(np.concatenate([np.zeros(4, np.uint8), flat]))
    moved = DeviceMatrix(
        buffer[4:].view(aligned.data.dtype).reshape(aligned.content.shape), aligned.format, width
    )
    found = []
    for matrix in (aligned, moved):
        padding = -rows.strides[0] % 16 if matrix is aligned else 0
        assert matrix.row_bytes == row_bytes(matrix.format, width) + padding
        out = device.to_device(np.empty((5, 21), np.float32))
        device.kernels.gemv(matrix, None, device.to_device(x), out)
        wide = device.to_device(np.empty((21, width), np.uint16))
        device.kernels.widen(matrix, 0, 21, wide)
        found.append((device.to_host(out), device.to_host(wide)))
    for own, other in zip(*found, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("kind", [*BITS, *IN_LAYERS])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16, 32])
def test_hot_ffn_of_many_parts(device: DeviceCalls, kind: str, num_tokens: int) -> None:
    """Parts of 16 neurons, so runs of parts too; steps of every number of tokens agree."""
    height, width = 333, 256
    kinds = (kind, kind, "q8" if kind in KINDS and kind not in SUMMED else kind)
    matrices = [random_matrix(s, k, height, width) for s, k in zip((7, 8, 9), kinds, strict=True)]
    x = random_floats(10, num_tokens, width)
    gate, up, down = (m[1] for m in matrices)
    gate_bias = random_floats(12, height) - np.float32(2 * np.sqrt(width) * gate.std())
    neurons = device.neurons(matrices[0][0], matrices[1][0], matrices[2][0], gate_bias)
    found, fired = device.selected_ffn(neurons, x, EVERYTHING, RELU, not_zero("relu"))
    count = np.count_nonzero(fired)
    vectors = x if kind in BITS else rounded(x)
    h = np.maximum(vectors @ gate.T + gate_bias, 0)
    assert count == (h != 0).any(axis=0).sum() and 0 < count < height
    expected = (h * (vectors @ up.T)) @ down
    sizes = (h * (np.abs(vectors) @ np.abs(up).T)) @ np.abs(down)
    sizes += (np.abs(x) @ np.abs(gate).T * np.abs(vectors @ up.T)) @ np.abs(down)  # h's rounding
    assert (np.abs(found - expected) <= 4e-6 * sizes + 1e-5).all()
    alone, _ = device.selected_ffn(neurons, x[-1:], EVERYTHING, RELU, not_zero("relu"))
    assert (alone[0] == found[-1]).all()


def rounded(x: np.ndarray) -> np.ndarray:
    """x as it meets quantized rows."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    values = np.rint(groups * (np.float32(127) / largest)).astype(np.float64)
    return (values * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 7])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_whole_ffn_is_added_to_the_residual(
    device: DeviceCalls, scale: float, has_bias: bool, num_blocks: int, num_tokens: int
) -> None:
    """To the bit of the driver's sum; not finite where the input is not, though nothing fires."""
    gate = np.abs(random_floats(7, 40, 72))
    starts = np.linspace(0, 40, num_blocks + 1).astype(np.int32)
    neurons = device.neurons(gate, None, random_floats(8, 40, 72), starts=starts)
    x, mixed = random_floats(9, num_tokens, 72), random_floats(10, num_tokens, 72)
    bias, chosen = random_floats(11, num_blocks, 72 if has_bias else 0), EVERYTHING
    if num_blocks > 1:
        weights = random_floats(12, num_tokens, num_blocks)
        chosen = EVERYTHING._replace(block_weights=np.where(weights < 0, np.float32(0), weights))
    residual = LayerResidual(mixed, bias, scale)
    plain, _ = device.selected_ffn(neurons, x, chosen, RELU, not_zero("relu"))
    hidden, of_biases = np.empty_like(x), np.empty_like(x)
    set_bias(chosen.block_weights, bias, of_biases, 0, 72)
    parts = np.stack([plain, of_biases] if has_bias else [plain])
    if scale == 1:
        merge_partials(mixed, parts, np.arange(len(parts)), 0, num_tokens, hidden)
    else:
        merge_normed(
            mixed, parts, np.arange(len(parts)), 0, num_tokens, np.int32(0), mixed[0, :0],
            np.float32(0), np.float32(scale), hidden,
        )  # fmt: skip
    found, _ = device.selected_ffn(neurons, x, chosen, RELU, not_zero("relu"), residual)
    np.testing.assert_array_equal(found, hidden)
    x[-1, 5] = -np.inf
    if num_blocks > 1:
        chosen = chosen._replace(block_weights=chosen.block_weights[-1:])
    found, fired = device.selected_ffn(
        neurons, x[-1:], chosen, RELU, not_zero("relu"),
        LayerResidual(mixed[-1:], bias, scale),
    )  # fmt: skip
    assert not fired.any() and np.isnan(found[0]).nonzero()[0].tolist() == [5]


def test_no_hot_neurons(device: DeviceCalls) -> None:
    neurons = device.neurons(*[np.empty((0, 24), np.uint16)] * 3)
    x = random_floats(2, 3, 24)
    found, fired = device.selected_ffn(neurons, x, EVERYTHING, RELU, not_zero("relu"))
    assert not found.any() and not fired.size


@pytest.mark.parametrize("kind", [*BITS, *KINDS])
@pytest.mark.parametrize("width", [32, 96, 512, 768, 1056])
def test_widen(device: DeviceCalls, kind: str, width: int) -> None:
    if kind in IN_BLOCKS:
        width = -(-width // 256) * 256  # whole blocks
    rows, weights = random_matrix(13, kind, 9, width)
    out = device.to_device(np.zeros((4, width), np.uint16))
    device.kernels.widen(device_matrix(rows, device.to_device), 3, 7, out)
    if rows.dtype in QUANTIZED:
        weights = to_float32(rows)
    expected = weights[3:7].astype(np.float32)
    found = device.to_host(out)
    assert (found == reference.narrowed(expected, np.uint16)).all()


def test_widen_of_every_float16_and_of_what_is_beyond(device: DeviceCalls) -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(32, -1)
    with np.errstate(invalid="ignore"):
        between = reference.widened(halves).astype(np.float32) * np.float32(1.0003)
    for rows in (
        halves,
        between,
        np.array([[70000, -1e9, 65519.9, 65520, 2e-8, 1e-30]], np.float32),
    ):
        out = device.to_device(np.zeros(rows.shape, np.uint16))
        device.kernels.widen(device_matrix(rows, device.to_device), 0, len(rows), out)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = reference.widened(rows).astype(np.float32).astype(np.float16)
        expected[np.isinf(expected)] = np.nan
        np.testing.assert_array_equal(device.to_host(out).view(np.float16), expected)


def test_too_many_tokens_and_too_wide_heads_are_refused(device: DeviceCalls) -> None:
    put = device.to_device
    matrix = device_matrix(np.ones((3, 8), np.float32), put)
    with pytest.raises(ValueError, match="33 tokens"):
        device.kernels.gemv(
            matrix, None, put(np.ones((33, 8), np.float32)), put(np.ones((33, 3), np.float32))
        )
    with pytest.raises(ValueError, match="heads of 264 numbers"):
        make_step(np.float32, (1, 1), 264, [3, 4]).run(device, 5)


def test_scratch_is_enough_for_fewer_tokens_and_neurons() -> None:
    for width in (64, 4096, 8192):
        for most in (10, 300, 5000, 11008, 28672):
            for tokens in (1, 3, 4, 5, 8, 32):
                num_items = ffn_scratch_items(tokens, most, width)
                for neurons in {1, 9, most // 7, most // 3, most // 2 + 1, most - 1, most}:
                    for t in {1, min(4, tokens), tokens}:
                        layout = FfnLayout(t, neurons, width)
                        assert layout.offsets[-1] <= num_items
                        assert layout.num_partials >= 1 and layout.part_size <= 128
