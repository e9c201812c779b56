"""Mixtures of experts: what config.json and tensors say, by the reference beside transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.storage_shares import token_reads
from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, layout_in
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.errors import ConfigError
from hotcold.model.files.checkpoint import Checkpoint
from tests.gguf_files import LlamaFile
from tests.reference import reference_logits, relative_difference
from tests.reference_experts import Tensors, expert_tensors
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE, make_tiny

IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60)


# A tiny model; what llama.cpp calls it; whether rows of q and k are paired; keys of the file.
FILES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "mixtral": ("mixtral", "llama", True, {"expert_count": 5, "expert_used_count": 3}),
    "qwen2moe": (
        "qwen2-moe",
        "qwen2moe",
        False,
        {
            "expert_count": 7,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 36,
        },
    ),
    "qwen3moe": (
        "qwen3-moe",
        "qwen3moe",
        False,
        {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 24},
    ),
    "olmoe": ("olmoe", "olmoe", False, {"expert_count": 7, "expert_used_count": 3}),
    "granitemoe": (
        "granite-moe",
        "granitemoe",
        True,
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.2,
            "logit_scale": 2.5,
        },
    ),
    "granitemoe-shared": (
        "granite-moe-shared",
        "granitemoe",
        True,
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "attention.scale": 0.3,
            "logit_scale": 1.0,
            "expert_shared_feed_forward_length": 28,
        },
    ),
    "glm4moe": (
        "glm4-moe-groups",
        "glm4moe",
        False,
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_count": 2,
            "leading_dense_block_count": 2,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.dimension_count": 10,
            "nextn_predict_layers": 1,
        },
    ),
    "gpt-oss": (
        "gpt-oss-plain",
        "gpt-oss",
        False,
        {
            "expert_count": 5,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "attention.sliding_window": 9,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "smallthinker": (
        "smallthinker-windows",
        "smallthinker",
        False,
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "attention.sliding_window": 9,
            "expert_gating_func": 1,
        },
    ),
}


def write_gguf(
    path: Path,
    case: str,
    layout: str = "stacked",
    kinds: dict[str, str] | None = None,
    change: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
    changed_keys: dict[str, Any] | None = None,
) -> None:
    """Write the model in `path` as llama.cpp's converter does, to m.gguf beside it.

    kinds: as of `LlamaFile`; change: of the experts' tensors.
    layout: "stacked" experts, "merged" gate and up, or "split", a tensor an expert, as once.
    """
    _, arch, pairs_rows, keys = FILES[case]
    keys = dict(keys)
    config, checkpoint = read_config(path), Checkpoint(path)
    values = json.loads((path / "config.json").read_text())
    drafts = keys.get("nextn_predict_layers", 0)
    sizes = {
        "num_hidden_layers": config.num_layers + drafts,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
    }
    theta = {"rope.freq_base": config.ropes[0].theta}
    tensors = load_file(path / "model.safetensors")
    parts = (".mlp.experts", ".mlp.gate.", ".mlp.router", ".mlp.shared", "_moe.", "_mlp.", "sinks")
    plain = {n: t for n, t in tensors.items() if not any(part in n for part in parts)}
    if config.tied_embeddings:
        plain.pop("lm_head.weight", None)
    extra: dict[str, np.ndarray] = {}
    for layer, spec in enumerate(config.layers):
        names = tensor_names(config).of_layer(layer)
        found = ffn_tensors(checkpoint, names.experts, spec.ffn)
        if found and layout == "split":
            for role in ("gate", "up", "down"):
                for expert, one in enumerate(found.pop(f"ffn_{role}_exps.weight")):
                    found[f"ffn_{role}.{expert}.weight"] = one
        if found and layout == "merged":
            both = [found.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")]
            found["ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
        if spec.attention.has_sinks:
            found["attn_sinks.weight"] = tensors[f"model.{names.sinks}"]
        extra |= {f"blk.{layer}.{name}": np.ascontiguousarray(t) for name, t in found.items()}
    if drafts:
        extra[f"blk.{config.num_layers}.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    change(extra)
    keys |= changed_keys or {}
    LlamaFile(
        values | sizes,
        plain,
        kinds=kinds or {},
        keys={f"{arch}.{key}": value for key, value in (theta | keys).items()},
        extra=extra,
        arch=arch,
        pairs_rows=pairs_rows,
    ).write(path / "m.gguf")


def ffn_tensors(
    checkpoint: Checkpoint, layouts: Sequence[ExpertNames], spec: FfnSpec
) -> dict[str, np.ndarray]:
    """A layer's experts by GGUF's names; {} of a dense layer."""
    layout = layout_in(layouts, checkpoint.has)
    if layout is None or spec.router is None:
        return {}
    tensors, found = Tensors(checkpoint), {}
    experts = [expert_tensors(tensors, layout, spec, e) for e in range(spec.router.num_experts)]
    columns = list(zip(*experts, strict=True))
    for role, gate_up_down in zip(("gate", "up", "down"), columns[:3], strict=True):
        found[f"ffn_{role}_exps.weight"] = torch.stack(gate_up_down)
    for role, biases in zip(("gate", "up", "down"), columns[3:6], strict=True):
        if spec.has_biases:
            found[f"ffn_{role}_exps.bias"] = torch.stack(biases)
    found["ffn_gate_inp.weight"] = tensors.of(layout.router)
    if spec.router.has_bias:
        found["ffn_gate_inp.bias"] = tensors.of(layout.router_bias)
    if spec.router.has_selection_bias:
        found["exp_probs_b.bias"] = tensors.of(layout.selection_bias)
    if len(spec.block_sizes) > spec.router.num_experts:
        gate, up = tensors.of(layout.shared_gate), tensors.of(layout.shared_up)
        if layout.shared_gate == layout.shared_up:
            gate, up = gate.chunk(2)
        found |= {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
        found["ffn_down_shexp.weight"] = tensors.of(layout.shared_down)
    if spec.router.gates_shared:
        found["ffn_gate_inp_shexp.weight"] = tensors.of(layout.shared_router)[0]
    return {name: tensor.float().numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("case", FILES)
def test_gguf_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    make_tiny(FILES[case][0], tmp_path)
    write_gguf(tmp_path, case)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    assert relative_difference(reference_logits(tmp_path / "m.gguf", IDS), expected) < 2e-5


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3-moe", {"mlp_only_layers": list(range(64))}),
        ("glm4-moe", {"first_k_dense_replace": 1 << 10}),
    ],
)
def test_dense_layers_alone_are_no_mixture(
    variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = make_tiny(variant, tmp_path) / "config.json"
    assert read_config(tmp_path).experts is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    config = read_config(tmp_path)
    assert config.experts is None
    assert config.ffn_sizes == (config.ffn_size,) * config.num_layers
    storage = NeuronStorage("", config.ffn_size, config.ffn_size)
    system = SystemConfig(str(tmp_path))
    assert token_reads(None, system, config, storage).num_bytes > 0


@pytest.mark.parametrize(
    ("variant", "changes", "said"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 8}, "num_experts_per_tok is 8"),
        (
            "qwen3-moe",
            {"num_experts": 1 << 16, "num_local_experts": None, "num_hidden_layers": 1000},
            "num_experts is 65536 in 1000 layers; at most",
        ),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; not supported"),
        ("glm4-moe-groups", {"n_group": 3}, "n_group is 3, which does not divide"),
        ("glm4-moe-groups", {"topk_group": 1}, "topk_group leaves 2 experts, but 3 are chosen"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("smallthinker", {"rope_layout": [1, 2, 1]}, "rope_layout is"),
        ("turbosparse-mixtral", {"hidden_act": "silu"}, "hidden_act is silu"),
    ],
)
def test_what_is_refused(variant: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = make_tiny(variant, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("variant", ["qwen2-moe", "glm4-moe"])
def test_experts_in_two_tensors(variant: str, tmp_path: Path) -> None:
    """As transformers 5 has them in memory, and some checkpoints on disk."""
    make_tiny(variant, tmp_path)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, spec in enumerate(config.layers):
        names = tensor_names(config).of_layer(layer)
        found, (named, in_two, *_) = ffn_tensors(checkpoint, names.experts, spec.ffn), names.experts
        if not found:
            continue
        each = (named.gate, named.up, named.down)
        stored = {name.format(e) for name in each for e in range(len(found["ffn_gate_inp.weight"]))}
        for name in {f"model.{name}" for name in (*stored, named.router)}:
            del tensors[name]
        halves = [found[f"ffn_{role}_exps.weight"] for role in ("gate", "up")]
        tensors[f"model.{in_two.gate}"] = np.concatenate(halves, axis=1)
        tensors[f"model.{in_two.down}"] = found["ffn_down_exps.weight"]
        tensors[f"model.{in_two.router}"] = found["ffn_gate_inp.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert relative_difference(reference_logits(tmp_path, IDS), expected) < 2e-5
