"""Matrices in the formats of their own layers: to the bit, in any part, and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.down_outputs import has_down_outputs, read_down_outputs
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.formats import Q4, Q4_K, Q6, Q8
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.placement.solver.cost import RowBytes
from tests.unit.test_gguf_model import file_of, tiny

# As files of four bits have them: what matters most, in half of the layers, in six.
MIXED = {
    "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "attn_": "Q4_K", "ffn_": "Q4_K",
    "token_embd": "Q6_K", "output.": "Q6_K",
}  # fmt: skip
DOWN = "model.layers.{}.mlp.down_proj.weight"


def runs(first: int, last: int) -> list[np.ndarray]:
    """The same neurons of both layers."""
    return [np.arange(first, last, dtype=np.int32)] * 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K"])
def test_rows_are_the_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    held = file_of(tiny(), path, {"ffn_down": kind})
    config = read_config(path)
    assert has_down_outputs(Checkpoint(path), config)
    with TensorReader(Checkpoint(path)) as reader:
        whole = read_down_outputs(reader, config, runs(0, 512))
        parts = [read_down_outputs(reader, config, runs(first, first + 256)) for first in (0, 256)]
    expected = {"Q4_0": Q4, "Q5_1": Q8, "Q6_K": Q6}[kind]
    assert whole.dtypes == (expected,)
    for layer in range(2):
        values = held[DOWN.format(layer)]
        error = np.abs(to_float32(whole.matrix(layer)) - values).max()
        assert error == 0 if kind != "Q5_1" else error <= np.abs(values).max() / 220
        found = np.concatenate([to_float32(part.matrix(layer)) for part in parts], axis=1)
        assert np.array_equal(found, to_float32(whole.matrix(layer)))


def test_formats_of_layers_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    held = file_of(tiny(), path, MIXED)
    system, config = prepare_system(path, SystemOptions(context_length=64))
    assert system.down_transposed
    attention = load_attention(Checkpoint(path), config)
    with TensorReader(Checkpoint(path)) as reader:
        down = read_down_outputs(reader, config, runs(0, 512))
    assert attention.qkv.dtypes == (Q4_K, Q6)
    assert [len(attention.qkv.parts(layer)) for layer in (0, 1)] == [2, 1]
    assert {down.matrix(0).dtype, down.matrix(1).dtype} == {Q6, Q4_K}
    values = held["model.layers.0.self_attn.v_proj.weight"]
    assert np.array_equal(to_float32(attention.qkv.parts(0)[1]), values)
    assert np.array_equal(to_float32(down.matrix(0)), held[DOWN.format(0)])
    assert attention_bytes(config) == sum(array.nbytes for array in vars(attention).values())
    gates = 2 * 512 * 2 * 144  # gate and up rows of both layers
    assert ffn_bytes(config, 1024) == gates + 4 * 1024 + down.nbytes
    assert RowBytes.of(config).down == round(down.nbytes / 1024)
    by_layer = dict(config.mean_row_bytes)
    assert Checkpoint(path).conversion_note(by_layer) == ""
    assert Checkpoint(path).conversion_note() == "Q4_K, Q6_K: read as 8 bits a weight"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"attn_q": "Q6_K", "attn_k": "Q4_K", "attn_v": "Q6_K"}, [Q6, Q4_K, Q6]),
        ({"attn_q": "Q6_K", "attn_k": "Q4_K", "attn_v": "Q4_K"}, [Q6, Q4_K]),
        ({"attn_q": "F16", "attn_k": "Q4_K", "attn_v": "Q4_K"}, [Q8, Q4_K]),
    ],
)
def test_formats_of_a_layer(
    kinds: dict[str, str], expected: list[np.dtype], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    held = file_of(tiny(), path, kinds | {"attn_output": "Q4_K"})
    qkv = load_attention(Checkpoint(path), read_config(path)).qkv
    assert [part.dtype for part in qkv.parts(1)] == expected
    found = np.concatenate([to_float32(part) for part in qkv.parts(1)])
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    values = np.concatenate([held[name] for name in names])
    assert np.abs(found - values).max() <= np.abs(values).max() / 100


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"mode": "exact"}, {"ffn_": "Q4_0"}),
        ({"weight_dtype": "q8"}, {"ffn_": "F32"}),
        ({}, {"ffn_": "F16"}),
        ({"plan": Path("plan.json")}, {"ffn_": "Q4_0"}),
    ],
)
def test_where_rows_are_neurons(
    changes: dict[str, Any], kinds: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    file_of(tiny(), path, kinds)
    plain, _ = prepare_system(path, SystemOptions(context_length=64))
    assert plain.down_transposed == (kinds == {"ffn_": "Q4_0"})
    try:
        system, _ = prepare_system(path, SystemOptions(context_length=64, **changes))
    except ArtifactError as error:  # the plan, which was not looked for otherwise
        assert "plan" in changes and "plan.json" in str(error)
    else:
        assert not system.down_transposed


def test_rows_of_six_bits_need_whole_blocks_of_neurons_alone(tmp_path: Path) -> None:
    """A hidden size that is no multiple of 256, as Gemma's, beside down projections in Q6_K."""
    path = tmp_path / "tiny.gguf"
    file_of(tiny(hidden_size=320), path, {"ffn_down": "Q6_K"})
    system, config = prepare_system(path, SystemOptions(context_length=64))
    assert system.down_transposed and config.dtype_of("down") == "q6"
    assert RowBytes.of(config).down == 320 * 210 // 256
