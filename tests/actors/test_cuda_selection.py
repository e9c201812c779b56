"""The GPU service's hot neurons by the selection of a request, over both stand-ins of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.failures import RequestError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import load_ffn
from hotcold.numba_kernels.decode.activations import not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING, Selection
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    COUNT_FFN,
    FFN,
    GATE_THRESHOLD,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PRODUCT_THRESHOLD,
    STREAM,
    WEIGHS_BLOCKS,
    threshold_words,
)
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_cuda_emulated import emulated_devices
from tests.conftest import TinyCheckpoint
from tests.kernels.neurons import SELECTIONS, factors, random_selection, starts_of_blocks
from tests.kernels.reference import activate, gemv, widened

Tiny = Callable[..., TinyCheckpoint]
NUM_BLOCKS, LAYER_ASKED, MANY = 4, 0, 40


class Blocks:
    """A system whose hot neurons stand in blocks, and the weights of one layer's."""

    def __init__(self, system: CudaInProcess, num_blocks: int) -> None:
        self.system, self.buffers = system, system.exchange.buffers
        model: Any = system.services[0]._model  # type: ignore[attr-defined]
        rng, sizes = np.random.default_rng(0), model.starts[:, -1]
        model.starts = np.array(
            [starts_of_blocks(rng, int(size), num_blocks) for size in sizes], np.int32
        )
        for layer, part in enumerate(model.ffn):
            if part is not None and num_blocks > 1:
                starts = system.device.empty((num_blocks + 1,), np.int32)
                system.device.upload(starts, model.starts[layer])
                model.ffn[layer] = replace(part, starts=starts)
                model.layers[layer].numbers.num_blocks = num_blocks
        self.starts = model.starts[LAYER_ASKED]
        ids = a_third(system.config.num_layers, system.config.ffn_size)
        checkpoint = Checkpoint(system.path)
        weights = load_ffn(checkpoint, system.config, ids, include_down_bias=False)
        rows = slice(0, int(self.starts[-1]))
        self.matrices = weights.gate[rows], weights.up[rows], weights.down[rows]

    def ask(self, selection: Selection, num_tokens: int, operation: int = FFN) -> np.ndarray:
        """The GPU's partial output; the request is written as the driver would."""
        buffers, (ids, weights) = self.buffers, (selection.ids, selection.block_weights)
        words = buffers.requests[0]
        words[OPERATION], words[LAYER], words[NUM_TOKENS] = operation, LAYER_ASKED, num_tokens
        words[NUM_IDS] = ids.size if selection.is_listed else ALL_NEURONS
        words[WEIGHS_BLOCKS] = weights.size > 0
        words[[GATE_THRESHOLD, PRODUCT_THRESHOLD]] = threshold_words([not_zero("relu")])[0]
        buffers.active_ids[0, : ids.size] = ids
        if num_tokens > 1 and ids.size:
            masks = selection.token_masks
            buffers.active_masks[0, : ids.size] = masks if masks.size else 2**32 - 1
        if weights.size:
            buffers.block_weights[:num_tokens] = weights
        buffers.partials[0] = np.nan
        self.system.exchange.request([0])
        return buffers.partials[0, :num_tokens].copy()

    def expected(self, x: np.ndarray, selection: Selection) -> np.ndarray:
        gate, up, down = self.matrices
        h = np.maximum(gemv(gate, x), 0) * gemv(up, x)
        found: np.ndarray = h * factors(selection, self.starts, len(x)) @ widened(down)
        return found


@pytest.fixture(params=["plain", "emulated"])
def make_device(request: pytest.FixtureRequest) -> Callable[[], NumpyDevice]:
    """Makes devices with NumPy's kernels, and with CUDA's."""
    return NumpyDevice if request.param == "plain" else emulated_devices()


@pytest.fixture(params=[NUM_BLOCKS, 1])
def blocks(
    request: pytest.FixtureRequest, tiny: Tiny, make_device: Callable[[], NumpyDevice]
) -> Iterator[Blocks]:
    num_blocks: int = request.param
    path, own = tiny("llama-relu").path, num_blocks if num_blocks > 1 else 0
    with CudaInProcess(path, hot=a_third, device=make_device(), num_blocks=own) as system:
        yield Blocks(system, num_blocks)


def inputs(blocks: Blocks, num_tokens: int) -> np.ndarray:
    x = np.random.default_rng(num_tokens).standard_normal(
        (num_tokens, blocks.system.config.hidden_size), np.float32
    )
    blocks.buffers.ffn_input[:num_tokens] = x
    return x


def selections_for(blocks: Blocks, num_tokens: int) -> list[Selection]:
    """One of each kind that the layer knows."""
    rng = np.random.default_rng(num_tokens)
    kinds = [kind for kind in SELECTIONS if blocks.starts.size > 2 or "blocks" not in kind]
    return [random_selection(rng, kind, blocks.starts, num_tokens) for kind in kinds]


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1e-3, np.abs(expected).max()))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 32])
def test_a_step(blocks: Blocks, num_tokens: int) -> None:
    """Three times each: launched one by one, captured, and as a graph; steps are filled up."""
    x = inputs(blocks, num_tokens)
    h = np.maximum(gemv(blocks.matrices[0], x), 0)
    for _ in range(3):
        for selection in selections_for(blocks, num_tokens):
            assert_near(blocks.ask(selection, num_tokens), blocks.expected(x, selection))
            fires = (h * factors(selection, blocks.starts, num_tokens) != 0).any(axis=0)
            assert blocks.buffers.replies[0, NUM_COMPUTED] == fires.sum()


def test_a_prompt_and_a_count(blocks: Blocks) -> None:
    """Many tokens compute all neurons of the blocks that they chose."""
    for num_tokens, operation in ((MANY, FFN), (MANY, COUNT_FFN), (5, COUNT_FFN)):
        x = inputs(blocks, num_tokens)
        for selection in selections_for(blocks, num_tokens if num_tokens < MANY else 1):
            if selection.is_listed:
                continue
            if selection.block_weights.size:
                rng = np.random.default_rng(num_tokens)
                weights = rng.uniform(0.2, 1.5, (num_tokens, NUM_BLOCKS)).astype(np.float32)
                weights *= rng.random(weights.shape) < 0.4
                weights[:, 1] = 0  # a block that no token chose
                selection = selection._replace(block_weights=weights)
            counts: Any = blocks.system.services[0].fired_counts  # type: ignore[attr-defined]
            before = counts.copy()
            assert_near(blocks.ask(selection, num_tokens, operation), blocks.expected(x, selection))
            h = activate(gemv(blocks.matrices[0], x), "relu")
            h *= factors(selection, blocks.starts, num_tokens)
            fired = (h != 0).sum(axis=0) if operation == COUNT_FFN else 0
            assert ((counts - before)[: blocks.starts[-1]] == fired).all()


def test_what_began_with_attention_is_of_all_neurons(blocks: Blocks, tiny: Tiny) -> None:
    """A request for some of them is not answered with it; with several blocks none begins."""
    ids, system, service = tiny("llama-relu").ids.tolist(), blocks.system, blocks.system.services[0]
    engine, words = system.engine("exact"), blocks.buffers.requests[0]
    for selection in selections_for(blocks, 1):
        engine.place(ids[:1], [0], [0])
        words[OPERATION], words[LAYER], words[NUM_TOKENS] = ATTENTION, LAYER_ASKED, 1
        words[[GATE_THRESHOLD, PRODUCT_THRESHOLD]] = threshold_words([not_zero("relu")])[0]
        system.exchange.request([0])
        has_begun = service._begun is not None  # type: ignore[attr-defined]
        assert has_begun == (blocks.starts.size == 2)
        x = blocks.buffers.ffn_input[:1].copy()
        assert_near(blocks.ask(selection, 1), blocks.expected(x, selection))


def test_a_dense_request_copies_no_selection(blocks: Blocks) -> None:
    """And one with a selection copies it, once each part."""
    inputs(blocks, 1)
    row, log = 4 * blocks.system.config.hidden_size, blocks.system.device.log
    for _ in range(2):
        log.clear()
        blocks.ask(EVERYTHING, 1)
    ends = ["graph", f"out {row}", "out 8"]
    assert log == [f"in {row}", *ends]
    selection = selections_for(blocks, 1)[-1]
    for _ in range(2):
        log.clear()
        blocks.ask(selection, 1)
    copies = [f"in {4 * blocks.starts[-1]}"]
    copies += [f"in {4 * NUM_BLOCKS}"] * (selection.block_weights.size > 0)
    assert log == [f"in {row}", *copies, *ends]


def test_weighed_blocks_are_not_uploaded(tiny: Tiny) -> None:
    path = tiny("llama-relu").path
    with CudaInProcess(path, hot=a_third, num_blocks=4, bundle_bytes=1 << 16) as system:
        blocks = Blocks(system, 4)
        inputs(blocks, MANY)
        selection = EVERYTHING._replace(block_weights=np.ones((MANY, 4), np.float32))
        with pytest.raises(RequestError, match="cannot be weighed"):
            blocks.ask(selection, MANY, STREAM)
