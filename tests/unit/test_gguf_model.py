"""Models in GGUF files: what is loaded of them against the gguf package."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hotcold.actors.setup.preflight import read_model
from hotcold.model.config.build import read_config
from hotcold.model.config.rope import RopeConfig
from hotcold.model.errors import CheckpointError, ConfigError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes
from hotcold.numba_kernels.formats import (
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    NVFP4,
    Q3_K,
    Q4,
    Q4_1,
    Q4_K,
    Q5,
    Q5_K,
    Q6,
    Q8,
)
from hotcold.numba_kernels.load.convert import to_float32
from tests.gguf_files import Draft, LlamaFile, small_llama
from tests.reference import reference_logits, relative_difference

Tensors = dict[str, np.ndarray]
IDS = [3, 7, 1, 90, 55, 20, 3, 3, 64]
OWN = {
    "Q4_0": Q4, "Q4_1": Q4_1, "Q4_K": Q4_K, "Q5_0": Q5, "Q5_K": Q5_K, "Q6_K": Q6, "Q8_0": Q8,
    "Q3_K": Q3_K, "IQ4_NL": IQ4_NL,
    "NVFP4": NVFP4, "IQ4_XS": IQ4_XS, "IQ3_S": IQ3_S, "IQ3_XXS": IQ3_XXS, "IQ2_S": IQ2,
    "IQ2_XS": IQ2, "IQ2_XXS": IQ2, "IQ1_M": IQ2, "IQ1_S": IQ2, "TQ1_0": Q4, "TQ2_0": Q4,
}  # fmt: skip
BLOCKS = [*OWN, "Q5_1", "Q2_K"]


@functools.cache
def tiny(hidden_size: int = 256) -> LlamaFile:
    """A random Llama, of rows that are whole blocks of 256."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": hidden_size,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (101, hidden_size),
        "lm_head": (101, hidden_size),
        "model.norm": (hidden_size,),
    }
    for layer in range(2):
        of_layer = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden_size,)),
            "self_attn.q_proj": (256, hidden_size),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (128, hidden_size)),
            "self_attn.o_proj": (hidden_size, 256),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (512, hidden_size)),
            "mlp.down_proj": (hidden_size, 512),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    rng = np.random.default_rng(5)
    tensors = {
        f"{name}.weight": rng.normal(float("norm" in name), 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return LlamaFile(sizes, tensors)


def file_of(model: LlamaFile, path: Path, kinds: dict[str, str] | None = None) -> Tensors:
    """Write a model as a GGUF file; returns the values it holds by Hugging Face's names."""
    return replace(model, kinds=kinds or {}).write(path)


def neurons(model: LlamaFile) -> list[np.ndarray]:
    sizes = model.config
    return [np.arange(sizes["intermediate_size"], dtype=np.int32)] * sizes["num_hidden_layers"]


PLAIN = small_llama()
SCALED = PLAIN.with_keys(llama__rope__scaling__factor=2.0)
YARN = PLAIN.with_keys(
    llama__rope__scaling__type="yarn",
    llama__rope__scaling__factor=4.0,
    llama__rope__scaling__original_context_length=32,
)


@pytest.mark.parametrize(
    ("draft", "key", "value"),
    [
        (SCALED, "llama.rope.scaling.attn_factor", 1.4),
        (YARN, "llama.rope.scaling.yarn_attn_factor", 1.4),
        (YARN, "llama.rope.scaling.yarn_ext_factor", 0.5),
        (PLAIN, "llama.rope.freq_base_swa", 1e6),
        (PLAIN, "llama.rope.dimension_sections", [16, 24, 24, 0]),
        (PLAIN, "other.rope.scaling.attn_factor", 1.0),
    ],
)
def test_no_key_of_the_rope_is_left_out(draft: Draft, key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(draft.content())
    read_config(path)
    path.write_bytes(draft.with_keys(**{key: value}).content())
    with pytest.raises(CheckpointError, match=f"key '{key}' is .*would change the result"):
        read_config(path)


def test_factors_of_the_rope_stand_alone(tmp_path: Path) -> None:
    """Not beside another factor; and a family that has no lists of factors does not lose them."""
    path, ones = tmp_path / "tiny.gguf", np.ones(32, np.float32)
    scaled = {"llama.rope.scaling.factor": 2.0}
    replace(tiny(), keys=scaled, extra={"rope_freqs.weight": ones}).write(path)
    with pytest.raises(CheckpointError, match=r"rope.scaling.factor stands beside factors"):
        read_config(path)
    length = {"llama.rope.scaling.original_context_length": 32}
    lists = {f"rope_factors_{name}.weight": 2 * ones for name in ("long", "short")}
    replace(tiny(), keys=length, extra=lists).write(path)
    with pytest.raises(ConfigError, match="'longrope', which is not supported"):
        read_config(path)


@pytest.mark.parametrize("positions", [8192, 2048])
def test_rope_factors_of_llama3(positions: int, tmp_path: Path) -> None:
    path, expected = (
        tmp_path / "tiny.gguf",
        RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, positions),
    )
    factors = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64) / expected.inv_freq(64)
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    written = replace(tiny(), keys={"llama.rope.freq_base": 500000.0}, extra=extra)
    written.write(path)
    rope = read_config(path).rope
    assert rope is not None and rope.factor == pytest.approx(8)
    assert replace(rope, factor=8.0) == expected
    extra["rope_freqs.weight"][3] = 5
    written.write(path)
    with pytest.raises(CheckpointError, match="factors of no known model"):
        read_config(path)


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_are_the_files(kind: str, tmp_path: Path) -> None:
    """Rows of q and k in a checkpoint's order; exact where a format holds the same numbers."""
    model, path = tiny(), tmp_path / "tiny.gguf"
    held = file_of(model, path, {"attn_": kind, "ffn_": kind, "token_embd": kind, "output.": kind})
    checkpoint, config = Checkpoint(path), read_config(path)
    attention = load_attention(checkpoint, config)
    ffn = load_ffn(checkpoint, config, neurons(model), include_down_bias=False)
    head = load_head(checkpoint, config)
    embedding = load_embedding(checkpoint, config)
    expected = OWN.get(kind, Q8)
    held_in = *attention.qkv.dtypes, *attention.out.dtypes, ffn.gate.dtype, ffn.up.dtype
    assert {*held_in} == {expected}
    assert ffn.down.dtype == Q8
    layer = "model.layers.1."
    parts = [held[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    is_exact = kind in OWN

    def check(found: np.ndarray, values: np.ndarray, exact: bool = is_exact) -> None:
        error = np.abs(to_float32(found) - values).max()
        assert error == 0 if exact else error <= np.abs(values).max() / 220

    check(attention.qkv.matrix(1), np.concatenate(parts))
    check(attention.out.matrix(1), held[f"{layer}self_attn.o_proj.weight"])
    check(ffn.gate[512:], held[f"{layer}mlp.gate_proj.weight"])
    check(ffn.up[512:], held[f"{layer}mlp.up_proj.weight"])
    check(ffn.down[512:], held[f"{layer}mlp.down_proj.weight"].T, False)
    check(head.head, held["lm_head.weight"])
    tokens = held["model.embed_tokens.weight"]
    assert np.array_equal(embedding.lookup(np.array(IDS), np.arange(len(IDS))), tokens[IDS])


def test_scales_of_nvfp4(tmp_path: Path) -> None:
    """llama.cpp multiplies what rows give with a tensor's scale; scales of activations are not."""
    path, model = tmp_path / "tiny.gguf", tiny()
    written = replace(model, kinds={"attn_": "NVFP4", "ffn_": "NVFP4"}, extra={})
    factors: dict[str, np.ndarray] = {}
    for layer in range(2):
        for part in ("attn_q", "attn_v", "ffn_gate", "ffn_down"):
            name = f"blk.{layer}.{part}"
            factors[name] = np.array([0.3 + 0.1 * len(factors)], np.float32)
            written.extra |= {f"{name}.scale": factors[name], f"{name}.input_scale": factors[name]}
    held = written.write(path)
    for layer in range(2):
        for part, own in (("attn_q", "self_attn.q"), ("attn_v", "self_attn.v"),
                          ("ffn_gate", "mlp.gate"), ("ffn_down", "mlp.down")):  # fmt: skip
            held[f"model.layers.{layer}.{own}_proj.weight"] *= factors[f"blk.{layer}.{part}"]
    checkpoint, config = Checkpoint(path), read_config(path)
    ffn = load_ffn(checkpoint, config, neurons(model), include_down_bias=False)
    assert ffn.gate.dtype == NVFP4
    gate = held["model.layers.1.mlp.gate_proj.weight"]
    np.testing.assert_allclose(to_float32(ffn.gate[512:]), gate, rtol=1e-6)
    replace(model, tensors=held).write(tmp_path / "floats.gguf")
    found, expected = (reference_logits(each, IDS) for each in (path, tmp_path / "floats.gguf"))
    assert relative_difference(found, expected) < 0.03  # down has 8 bits
    written.extra["blk.0.attn_q.scale"] = np.array([np.nan], np.float32)
    written.write(path)
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_q.scale' is not 1 finite numbers"):
        Checkpoint(path)


def test_matrices_of_a_kind_are_in_one_format(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    kinds = {"blk.0.attn_v": "Q6_K", "attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q4_0"}
    kinds |= {"attn_output": "Q4_0", "ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "F16"}
    held = file_of(tiny(), path, kinds | {"token_embd": "F16", "output.": "F16"})
    config = read_model(path)
    found = {kind: config.dtype_of(kind) for kind in ("qkv", "out", "gate", "down", "head")}
    assert found == {
        "qkv": "q4", "out": "q4", "gate": "q8", "down": "float16", "head": "float16"
    }  # fmt: skip
    checkpoint = Checkpoint(path)
    attention, head = load_attention(checkpoint, config), load_head(checkpoint, config)
    ffn = load_ffn(checkpoint, config, neurons(tiny()), include_down_bias=False)
    assert attention_bytes(config) == sum(array.nbytes for array in vars(attention).values())
    assert head_bytes(config) == sum(array.nbytes for array in vars(head).values())
    sizes = [array.nbytes for name, array in vars(ffn).items() if name not in ("starts", "stripes")]
    assert ffn_bytes(config, 1024) == sum(sizes)
    keys = to_float32(attention.qkv.parts(1)[0])[256:384]
    assert np.array_equal(keys, held["model.layers.1.self_attn.k_proj.weight"])
    assert read_model(path, "q4").other_dtypes == ()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    file_of(tiny(), path, {"ffn_": "Q8_0", "token_embd": "Q8_0"})
    content = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    starts = {tensor.name: int(tensor.data_offset) for tensor in reader.tensors}
    for name in ("blk.1.ffn_down.weight", "blk.0.ffn_up.weight", "token_embd.weight"):
        damaged = content.copy()
        damaged[starts[name] + 34 * 5 : starts[name] + 34 * 5 + 2] = b"\x00\x7c"
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            reference_logits(path, IDS)


def test_what_is_read_otherwise_is_said(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for kinds, said in (
        ({}, ""),
        ({"attn": "Q8_0", "ffn": "Q8_0"}, ""),
        ({"ffn_gate": "Q4_0", "ffn_up": "Q5_1"}, "Q4_0, Q5_1: read as 8 bits a weight"),
        ({"attn": "Q5_1", "ffn": "Q6_K"}, "Q5_1, Q6_K: read as 8 bits a weight"),
        ({"attn_q": "Q6_K", "attn_k": "Q5_0"}, "Q6_K, Q5_0, F32: read as 8 bits a weight"),
        ({"attn": "Q4_1", "ffn_gate": "Q4_K", "ffn_up": "Q4_K"}, ""),
        ({"attn": "IQ4_XS", "ffn_gate": "IQ4_NL", "ffn_up": "IQ4_NL"}, ""),
        (
            {"attn": "IQ3_S", "0.ffn_gate": "IQ2_S", "ffn_gate": "IQ1_M", "ffn_up": "IQ2_XXS"},
            "IQ3_S, IQ2_S, IQ2_XXS, IQ1_M: read as 4 bits a weight",
        ),
    ):
        file_of(tiny(), path, kinds)
        assert Checkpoint(path).conversion_note() == said
