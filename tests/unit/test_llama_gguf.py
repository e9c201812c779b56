"""GGUF files hold the weights that hotcold reads, where llama.cpp expects them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.model.config.build import read_config
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.synthetic.make import make_model
from hotcold.model.synthetic.shape import SHAPES as KNOWN
from hotcold.model.synthetic.shape import SyntheticShape
from hotcold.numba_kernels.formats import Q4, Q8
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.load.quantize import quantize_rows
from tests.benchmark_programs import error_of, output_of, run_benchmark

gguf = pytest.importorskip("gguf")

# A row of 576 weights is a chunk of 16 groups and one of two; FFN rows are shorter than a chunk.
SHAPES = {
    "llama": SyntheticShape("llama", 576, 96, 4, 2, 144, 64, 64, 2),
    "falcon": SyntheticShape("falcon", 576, 192, 4, 1, 144, 64, 64, 2),
    "falcon-grouped": SyntheticShape("falcon", 576, 192, 6, 3, 96, 64, 64, 2),
    "opt": SyntheticShape("opt", 64, 256, 4, 4, 16, 64, 64, 2),
}
KINDS = {"f16": "F16", "q8": "Q8_0", "q4": "Q4_0"}
FORMATS = {"q8": Q8, "q4": Q4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        make_model(folder / name, shape)
    return folder


def _written(model: Path, dtype: str, folder: Path) -> dict[str, np.ndarray]:
    """The file's tensors, dequantized to float32 by gguf itself; their formats are checked."""
    out = folder / "model.gguf"
    output_of(run_benchmark("llama_gguf", model, out, "--dtype", dtype))
    assert not list(folder.glob("*.part"))
    found = {}
    for tensor in gguf.GGUFReader(str(out)).tensors:
        if tensor.name == "token_embd.weight":
            assert tensor.tensor_type.name == "F16"
        elif len(tensor.shape) == 2:
            assert tensor.tensor_type.name == KINDS[dtype]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = values.reshape(tuple(tensor.shape)[::-1])
    return found


def _read(model: Path, name: str, dtype: str) -> np.ndarray:
    """What hotcold computes with, given its --dtype; of down, had hotcold grouped it as ggml."""
    bits = np.ascontiguousarray(Checkpoint(model).array(name))
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return to_float32(quantize_rows(bits, FORMATS[dtype]))


def _assert_same(
    model: Path, dtype: str, found: dict[str, np.ndarray], names: dict[str, str]
) -> None:
    for theirs, ours in names.items():
        np.testing.assert_array_equal(found[theirs], _read(model, ours, dtype), theirs)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_llama_has_the_same_weights(models: Path, dtype: str, tmp_path: Path) -> None:
    model = models / "llama"
    found = _written(model, dtype, tmp_path)
    names = {"output.weight": "lm_head.weight"}
    for layer in range(2):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        names |= {
            f"{theirs}attn_v.weight": f"{ours}self_attn.v_proj.weight",
            f"{theirs}attn_output.weight": f"{ours}self_attn.o_proj.weight",
            f"{theirs}ffn_gate.weight": f"{ours}mlp.gate_proj.weight",
            f"{theirs}ffn_up.weight": f"{ours}mlp.up_proj.weight",
            f"{theirs}ffn_down.weight": f"{ours}mlp.down_proj.weight",
        }
        for name, heads in (("q", 4), ("k", 2)):
            rows = _read(model, f"{ours}self_attn.{name}_proj.weight", dtype)
            paired = found[f"{theirs}attn_{name}.weight"]
            for head in range(heads):
                for pair in range(72):  # the two rows that rotate together stand side by side
                    first = head * 144 + pair
                    at = head * 144 + 2 * pair
                    np.testing.assert_array_equal(paired[at : at + 2], rows[[first, first + 72]])
    _assert_same(model, dtype, found, names)
    embedding = _read(model, "embed_tokens.weight", "f16")
    np.testing.assert_array_equal(found["token_embd.weight"], embedding)
    assert len(found) == 3 + 2 * 9


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["falcon", "falcon-grouped"])
def test_a_falcon_has_the_same_weights(models: Path, name: str, dtype: str, tmp_path: Path) -> None:
    model, shape = models / name, SHAPES[name]
    found = _written(model, dtype, tmp_path)
    names = {"output.weight": "word_embeddings.weight"}
    for layer in range(2):
        ours, theirs = f"h.{layer}.", f"blk.{layer}."
        names |= {
            f"{theirs}attn_output.weight": f"{ours}self_attention.dense.weight",
            f"{theirs}ffn_up.weight": f"{ours}mlp.dense_h_to_4h.weight",
            f"{theirs}ffn_down.weight": f"{ours}mlp.dense_4h_to_h.weight",
        }
        rows = _read(model, f"{ours}self_attention.query_key_value.weight", dtype)
        heads = rows.reshape(-1, shape.head_dim, shape.hidden)
        group = shape.heads // shape.kv_heads + 2
        numbers = range(len(heads))
        order = [n for n in numbers if n % group < group - 2]
        order += [n for n in numbers if n % group == group - 2]
        order += [n for n in numbers if n % group == group - 1]
        expected = heads[order].reshape(rows.shape)
        np.testing.assert_array_equal(found[f"{theirs}attn_qkv.weight"], expected)
        if shape.has_grouped_kv:
            norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
        else:
            norms = {"attn_norm": "input_layernorm"}
        for target, norm in norms.items():
            for part in ("weight", "bias"):
                values = Checkpoint(model).array(f"{ours}{norm}.{part}").view(np.float16)
                np.testing.assert_array_equal(found[f"{theirs}{target}.{part}"], values)
    _assert_same(model, dtype, found, names)


def test_an_opt_is_a_llama_of_equal_bytes(models: Path, tmp_path: Path) -> None:
    config = read_config(models / "opt")
    found = _written(models / "opt", "q8", tmp_path)
    by_part = {"attn": 0, "ffn": 0}
    for name, values in found.items():
        part = name.split(".")[-2].split("_")[0]
        if values.ndim == 2 and part in by_part:
            by_part[part] += values.size
    assert by_part["attn"] == 2 * 4 * 64 * 64
    rounding = 32 // 2 * 3 * 64 * 2  # to the nearest multiple of 32 neurons
    assert abs(by_part["ffn"] - 2 * 2 * config.ffn_size * 64) <= rounding
    assert found["output.weight"].shape == (config.vocab_size, 64)
    said = output_of(run_benchmark("llama_gguf", models / "opt", tmp_path / "other.gguf"))
    assert "160 neurons of three matrices for 256 of two" in said


def test_what_cannot_be_written_is_refused_in_a_line(tmp_path: Path) -> None:
    make_model(tmp_path / "b", SHAPES["llama"], dtype="bfloat16")
    out = tmp_path / "model.gguf"
    assert "is in bfloat16; give a model in float16" in error_of(
        run_benchmark("llama_gguf", tmp_path / "b", out)
    )
    make_model(tmp_path / "narrow", SyntheticShape("llama", 48, 64, 4, 4, 12, 64, 64, 1))
    text = error_of(run_benchmark("llama_gguf", tmp_path / "narrow", out, "--dtype", "q8"))
    assert "rows of 48 weights" in text and "f16" in text
    make_model(tmp_path / "mixture", KNOWN["tiny-moe"])
    text = error_of(run_benchmark("llama_gguf", tmp_path / "mixture", out))
    assert "is a mixture of experts; benchmarks.random_gguf writes one of its shape" in text
    assert not out.exists() and not list(tmp_path.glob("*.part"))
