"""A device's kernels as the service calls them: steps of several tokens, over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.kernels import Layer, PagedCache
from hotcold.cuda_kernels.neurons import LayerResidual
from hotcold.cuda_kernels.source import Entry
from hotcold.numba_kernels.decode.activations import activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING
from hotcold.numba_kernels.ffn.in_memory import set_bias
from hotcold.numba_kernels.formats import QUANTIZED
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.loops.output_sums import merge_normed, merge_partials
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.backends import emulated_calls
from tests.kernels.device_calls import DeviceCalls, device_matrix
from tests.kernels.emulation.launcher import aligned
from tests.kernels.layer_numbers import device_layer
from tests.kernels.quantized_rows import IN_BLOCKS, KINDS, random_matrix, random_rows

pytestmark = pytest.mark.sweep(kind=["f32", "f16", "q8", "q4"])

PAGE = 64
RELU = activation("relu")


@dataclass(frozen=True)
class Step:
    """Tokens of several sequences, whose keys and values stand in a paged cache."""

    qkv: np.ndarray
    num_heads: int
    num_kv_heads: int
    table: np.ndarray  # rope, of keys
    query_table: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    cache: np.ndarray  # (2, pages, KV, 64, dim)
    sinks: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.positions, self.slots, self.page_tables

    def layer(self, put: Callable[[np.ndarray], Any], table: np.ndarray) -> Layer:
        """With `table` as the rope of keys, and queries' own where there is one."""
        dim = self.cache.shape[-1]
        facts: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        vectors = {"sinks": self.sinks}
        own = self.query_table if table.size else table
        return device_layer(put, table, vectors, own, head_dim=dim, scale=dim**-0.5, **facts)

    def token(self, t: int) -> Step:
        """The step of one token alone."""
        rows = slice(t, t + 1)
        places = self.positions[rows], self.slots[rows], self.page_tables
        counts = self.num_heads, self.num_kv_heads
        tables = self.table, self.query_table
        return Step(self.qkv[rows], *counts, *tables, *places, self.cache, self.sinks)

    def run(self, device: DeviceCalls, max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """The heads' outputs, and the cache afterwards."""
        out, cache = self.attend(device, max_length)
        return device.to_host(out), np.stack([device.to_host(part) for part in cache[:2]])

    def attend(
        self, device: DeviceCalls, max_length: int, reader: Any = None
    ) -> tuple[Any, PagedCache]:
        """The same on the device."""
        kernels, put = device.kernels, device.to_device
        qkv, cache = put(self.qkv), PagedCache(*map(put, (*self.cache, *self.places)))
        layer = self.layer(put, self.table)
        kernels.rope_store(layer, qkv, cache)
        dim, num_tokens = self.cache.shape[-1], len(self.qkv)
        items = kernels.attention_scratch_items(num_tokens, self.num_heads, dim, max_length)
        scratch = put(np.full(items, np.nan, np.float32))
        out = put(np.empty((num_tokens, self.num_heads * dim), np.float32))
        kernels.decode_attention(layer, qkv, cache, max_length, scratch, out, reader)
        return out, cache


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
        query_table=random_floats(5, max(positions) + 1, 2, dim // 2),
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
        parts = (step.query_table, 0, step.num_heads), (step.table, step.num_heads, first_value)
        for table, first, last in parts:
            heads[t, first:last] = reference.rope(heads[t, first:last], table[position])
        page = step.page_tables[step.slots[t], position // PAGE]
        for part, first in enumerate((step.num_heads, first_value)):
            own = heads[t, first : first + step.num_kv_heads].astype(np.float32)
            cache[part, page, :, position % PAGE] = reference.narrowed(own, cache.dtype.type)
    out = np.empty((len(heads), step.num_heads * dim))
    for t, position in enumerate(step.positions):
        pages = cache[:, step.page_tables[step.slots[t]]].transpose(0, 2, 1, 3, 4)
        keys, values = pages.reshape(2, step.num_kv_heads, -1, dim)
        queries = heads[t, : step.num_heads]
        sinks = step.sinks if step.sinks.size else None
        found = reference.decode_attention(queries, keys, values, position + 1, sinks=sinks)
        out[t] = found.reshape(-1)
    return out, cache


SHAPES = [((8, 8), 64), ((8, 2), 128), ((6, 1), 20), ((16, 1), 256), ((2, 1), 8)]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["f32", "f16"])
@pytest.mark.parametrize("sinks", [0, 1, 200])
@pytest.mark.parametrize(("heads", "dim"), SHAPES, ids=str)
def test_attention_step(
    device: DeviceCalls, dtype: type, heads: tuple[int, int], dim: int, sinks: int
) -> None:
    """Sinks join the softmax: larger than any score, too."""
    step = make_step(dtype, heads, dim, [199, 200, 0, 127, 128, 300])
    if sinks:
        step = replace(step, sinks=np.linspace(-sinks, sinks, heads[0], dtype=np.float32))
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


@pytest.mark.parametrize(
    ("scale", "has_bias", "num_blocks", "num_tokens"),
    [(1.0, False, 1, 3), (1.0, True, 7, 8), (0.3, True, 1, 1), (0.3, False, 7, 3)],
)
def test_a_whole_ffn_is_added_to_the_residual(
    device: DeviceCalls, scale: float, has_bias: bool, num_blocks: int, num_tokens: int
) -> None:
    """To the bit of the driver's sum; not finite where the input is not, though nothing fires."""
    gate = np.abs(random_floats(7, 40, 72))
    starts = np.linspace(0, 40, num_blocks + 1).astype(np.int32)
    neurons = device.neurons(gate, None, random_floats(8, 40, 72), starts=starts)
    x, ffn_residual = random_floats(9, num_tokens, 72), random_floats(10, num_tokens, 72)
    bias, chosen = random_floats(11, num_blocks, 72 if has_bias else 0), EVERYTHING
    if num_blocks > 1:
        weights = random_floats(12, num_tokens, num_blocks)
        chosen = EVERYTHING._replace(block_weights=np.where(weights < 0, np.float32(0), weights))
    residual = LayerResidual(ffn_residual, bias, scale)
    plain, _ = device.selected_ffn(neurons, x, chosen, RELU, not_zero("relu"))
    hidden, of_biases = np.empty_like(x), np.empty_like(x)
    set_bias(chosen.block_weights, bias, of_biases, 0, 72)
    parts = np.stack([plain, of_biases] if has_bias else [plain])
    if scale == 1:
        merge_partials(ffn_residual, parts, np.arange(len(parts)), 0, num_tokens, hidden)
    else:
        merge_normed(
            ffn_residual, parts, np.arange(len(parts)), 0, num_tokens, np.int32(0), ffn_residual[0,
            :0], np.float32(0), np.float32(scale), hidden,
        )  # fmt: skip
    found, _ = device.selected_ffn(neurons, x, chosen, RELU, not_zero("relu"), residual)
    np.testing.assert_array_equal(found, hidden)
    x[-1, 5] = -np.inf
    if num_blocks > 1:
        chosen = chosen._replace(block_weights=chosen.block_weights[-1:])
    found, fired = device.selected_ffn(
        neurons, x[-1:], chosen, RELU, not_zero("relu"),
        LayerResidual(ffn_residual[-1:], bias, scale),
    )  # fmt: skip
    assert not fired.any() and np.isnan(found[0]).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("width", [1, 513, 1536, 5120])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_normed_sum_is_added_to_the_residual(
    device: DeviceCalls, width: int, scale: float
) -> None:
    """To the bit of the driver's; a NaN stays one."""
    x, residual = random_floats(1, 3, width) * 30, random_floats(2, 3, width)
    weight, epsilon = random_floats(3, width), np.float32(1e-6)
    x[2, width // 2] = np.nan
    facts: Any = {"norm_kind": 0, "norm_eps": epsilon, "residual_scale": scale}
    put, hidden = device.to_device, np.empty_like(x)
    layer, out = device_layer(put, **facts), put(np.zeros_like(x))
    device.kernels.norm(layer, put(x), put(weight), put(weight[:0]), out, put(residual))
    merge_normed(
        residual, x[None], np.arange(1), 0, 3, np.int32(0), weight, epsilon, np.float32(scale),
        hidden,
    )  # fmt: skip
    np.testing.assert_array_equal(device.to_host(out), hidden)
    assert np.isnan(hidden[2]).all() and np.isfinite(hidden[:2]).all()


@pytest.mark.parametrize("kind", ["f16", "q8", "q4_1"])
@pytest.mark.parametrize(("width", "num_tokens"), [(32, 1), (544, 3), (5120, 32)])
def test_a_norm_quantizes_for_its_reader(
    device: DeviceCalls, monkeypatch: pytest.MonkeyPatch, kind: str, width: int, num_tokens: int
) -> None:
    """To the bit of two kernels, of which it saves one; what is read again is quantized again."""
    put, kernels = device.to_device, device.kernels
    x, weight = random_floats(1, num_tokens, width), random_floats(2, width)
    x[0, 3] = np.nan
    layer = device_layer(put, norm_kind=0, norm_eps=np.float32(1e-6))
    rows, none = device_matrix(random_matrix(3, kind, 9, width)[0], put), put(weight[:0])
    found, names, launch = [], list[str](), kernels._launcher.launch

    def noting(entry: Entry, *arguments: Any) -> None:
        names.append(entry.file)
        launch(entry, *arguments)

    monkeypatch.setattr(kernels._launcher, "launch", noting)
    for reader in (None, rows):
        normed, out = put(np.zeros_like(x)), put(np.zeros((num_tokens, 9), np.float32))
        kernels.norm(layer, put(x), put(weight), none, normed, reader=reader)
        for _ in range(2):
            kernels.gemv(rows, none, normed, out)
            found.append(device.to_host(out).copy())
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    assert np.isnan(found[0][0]).all() and np.isfinite(found[0][1:]).all()
    once = ["gemv"] if kind == "f16" else ["quantize", "gemv"]
    assert names == ["norm", *once, *once, "norm", "gemv", *once]


@pytest.mark.parametrize("head_dim", [64, 160, 80])
def test_heads_are_quantized_for_their_reader(device: DeviceCalls, head_dim: int) -> None:
    """Where a head's numbers are whole groups; to the bit of another kernel that does it."""
    step = make_step(np.float32, (4, 2), head_dim, [199, 200, 0])
    put, found = device.to_device, []
    rows = device_matrix(random_rows(3, "q8", 9, 4 * head_dim).rows, put)
    for reader in (None, rows):
        out = put(np.zeros((3, 9), np.float32))
        heads, _ = step.attend(device, 201, reader)
        device.kernels.gemv(rows, put(np.zeros(0, np.float32)), heads, out)
        found.append(device.to_host(out))
    assert found[0].tobytes() == found[1].tobytes() and found[0].any()


@pytest.mark.parametrize("kind", [*BITS, *KINDS])
def test_widen(device: DeviceCalls, kind: str) -> None:
    for width in (256, 512, 768, *(() if kind in IN_BLOCKS else (32, 96, 1056))):
        rows, weights = random_matrix(13, kind, 9, width)
        out = device.to_device(np.zeros((4, width), np.uint16))
        device.kernels.widen(device_matrix(rows, device.to_device), 3, 7, out)
        wide = to_float32(rows) if rows.dtype in QUANTIZED else weights.astype(np.float32)
        expected = reference.narrowed(wide[3:7], np.uint16)
        np.testing.assert_array_equal(device.to_host(out), expected)


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


@pytest.mark.parametrize("num_tokens", [1, 32])
def test_the_order_of_threads_and_blocks_changes_nothing(
    emulated_library: Path, num_tokens: int
) -> None:
    """Without a barrier that is needed it would."""
    rows = [random_rows(seed, "q8", 90, 512).rows for seed in (1, 2, 3)]
    x = random_floats(4, num_tokens, 512)
    queries, cache = random_floats(6, 8, 64), random_floats(7, 2, 2, 300, 64)
    found = []
    for is_reversed in (False, True):
        calls = emulated_calls(emulated_library, is_reversed)
        neurons = calls.neurons(rows[0], rows[1], rows[2])
        out, fired = calls.selected_ffn(neurons, x, EVERYTHING, RELU, not_zero("relu"))
        heads = calls.decode_attention(queries, cache[0], cache[1], 290)
        halves = np.zeros((90, 512), np.uint16)
        calls.kernels.widen(device_matrix(rows[0], aligned), 0, 90, halves)
        found.append([out, fired, heads, halves])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert halves.any()
