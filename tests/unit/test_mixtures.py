"""Mixtures of experts: what config.json and tensors say, by the reference beside transformers."""

from __future__ import annotations

import functools
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
from hotcold.model.weights.draft_layer import has_draft_layer
from tests.gguf_files import LlamaFile, left_out
from tests.reference import reference_logits, relative_difference
from tests.reference_experts import Tensors, expert_tensors
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE, make_tiny
from tests.unit.test_weights import change_config

IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60)


Keys = dict[str, Any]
Case = tuple[str, str, bool, Keys]


def _case(variant: str, arch: str, *keys: Keys, pairs_rows: bool = False) -> Case:
    """A tiny model; what llama.cpp calls it; whether rows of q and k are paired; its keys."""
    return variant, arch, pairs_rows, functools.reduce(dict.__or__, keys)


def _experts(count: int, used: int, size: int = 0, shared: int = 0, **more: Any) -> Keys:
    """Keys of a mixture's experts; without a size their neurons are the model's."""
    lengths = {"feed_forward_length": size, "shared_feed_forward_length": shared}
    lengths = {key: length for key, length in lengths.items() if length}
    keys = {"count": count, "used_count": used, **lengths, **more}
    return {f"expert_{key}": value for key, value in keys.items()}


def _routed(**more: Any) -> Keys:
    """Of eight experts that are chosen by sigmoids."""
    return _experts(8, 3, 24, **{"shared_count": 1, "weights_norm": True, "gating_func": 2} | more)


def _recurrent(state: int, groups: int, inner: int, rank: int) -> Keys:
    """Keys of layers with a state."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": rank,
    }


_YARN: Keys = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
_LATENT: Keys = {
    **_YARN,
    "attention.kv_lora_rank": 28,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
}
_LATENT_QUERIES: Keys = {**_LATENT, "attention.q_lora_rank": 20}
_DELTA: Keys = {"rope.dimension_count": 8, **_recurrent(16, 2, 48, 4)}
_BLOCKS: Keys = {
    "block_count": 8,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": [0, 0, 0, 2, 0, 0, 0, 0],
    "rope.dimension_count": 12,
    "rope.scaling.finetuned": False,
    **_recurrent(12, 2, 80, 8),
}
_GRANITE: Keys = {"attention.scale": 0.3, "logit_scale": 1.0}
_ONE_DENSE: Keys = {"leading_dense_block_count": 1}
_NO_DENSE: Keys = {"leading_dense_block_count": 0}
_GROUPS = {"group_count": 4, "group_used_count": 2}
FILES: dict[str, Case] = {
    "mixtral": _case("mixtral", "llama", _experts(5, 3), pairs_rows=True),
    "qwen2moe": _case("qwen2-moe", "qwen2moe", _experts(7, 3, 24, 36)),
    "qwen3moe": _case("qwen3-moe", "qwen3moe", _experts(7, 3, 24)),
    "olmoe": _case("olmoe", "olmoe", _experts(7, 3)),
    "granitemoe": _case(
        "granite-moe",
        "granitemoe",
        _experts(6, 3),
        {
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.2,
            "logit_scale": 2.5,
        },
        pairs_rows=True,
    ),
    "granitemoe-shared": _case(
        "granite-moe-shared", "granitemoe", _GRANITE, _experts(6, 3, shared=28), pairs_rows=True
    ),
    "granite4": _case(
        "granite4-moe",
        "granitemoe",
        _GRANITE,
        _experts(6, 3, shared=76),
        {"rope.scaling.finetuned": True},
        pairs_rows=True,
    ),
    "ernie4_5-moe": _case(
        "ernie4.5-moe",
        "ernie4_5-moe",
        _experts(7, 3, 24, shared_count=2),
        {"interleave_moe_layer_step": 1, **_ONE_DENSE},
    ),
    "qwen3vlmoe": _case(
        "qwen3-vl-moe",
        "qwen3vlmoe",
        _experts(7, 3, 24),
        {"rope.dimension_sections": [2, 2, 2, 0]},
    ),
    "glm4moe": _case(
        "glm4-moe-groups",
        "glm4moe",
        _routed(shared_count=2, weights_scale=1.7, **_GROUPS),
        {"leading_dense_block_count": 2, "rope.dimension_count": 10, "nextn_predict_layers": 1},
    ),
    "deepseek2": _case(
        "deepseek-v3",
        "deepseek2",
        _LATENT_QUERIES,
        _ONE_DENSE,
        _routed(weights_scale=1.7, **_GROUPS),
        {"rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "minimax-m2": _case(
        "minimax-m2", "minimax-m2", _experts(7, 3, 40, gating_func=2), {"rope.dimension_count": 10}
    ),
    "mistral4": _case(
        "mistral4",
        "mistral4",
        _LATENT_QUERIES,
        _NO_DENSE,
        _experts(8, 3, 24, shared_count=1, weights_norm=True),
        {
            "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.temperature_scale": 0.4,
            "attention.temperature_length": 32,
        },
    ),
    "deepseek2-lite": _case(
        "deepseek-v2",
        "deepseek2",
        _LATENT,
        _NO_DENSE,
        _experts(8, 3, 24, shared_count=1, weights_scale=1.3),
        {"rope.scaling.yarn_log_multiplier": 0.07},
    ),
    "granitehybrid": _case(
        "granite4-h-moe",
        "granitehybrid",
        _experts(6, 3, shared=76),
        _recurrent(12, 1, 96, 8),
        {
            "attention.scale": 0.3,
            "attention.head_count_kv": [0, 2, 0, 0],
            "rope.scaling.finetuned": False,
        },
        pairs_rows=True,
    ),
    "nemotron_h": _case(
        "nemotron-h", "nemotron_h", _BLOCKS, {"feed_forward_length": [0, 88, 0, 0, 88, 0, 0, 88]}
    ),
    "nemotron_h_moe": _case(
        "nemotron-h-moe",
        "nemotron_h_moe",
        _BLOCKS,
        _routed(shared=36, weights_scale=1.7),
        {"feed_forward_length": [0, 24, 0, 0, 24, 0, 0, 24]},
    ),
    "hunyuan-moe": _case("hunyuan-moe", "hunyuan-moe", _experts(7, 3, 40, 40, shared_count=1)),
    "dots1": _case("dots1", "dots1", _routed(shared_count=2), _ONE_DENSE),
    "hy_v3": _case(
        "hy3", "hy_v3", _routed(shared=24, weights_scale=2.826), {"rope.freq_base": 11158840.0}
    ),
    "exaone-moe": _case(
        "exaone-moe",
        "exaone-moe",
        _routed(weights_scale=2.5),
        _ONE_DENSE,
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, True, True, False, True],
        },
    ),
    "bailingmoe2": _case(
        "bailing2",
        "bailingmoe2",
        _routed(shared=24, weights_scale=1.7, **_GROUPS),
        _ONE_DENSE,
        {"rope.dimension_count": 10},
    ),
    "lfm2moe": _case(
        "lfm2-moe",
        "lfm2moe",
        _experts(7, 3, 24, gating_func=2),
        _ONE_DENSE,
        {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": [0, 0, 2, 0],
            "shortconv.l_cache": 3,
        },
    ),
    "qwen35moe": _case(
        "qwen3.5-moe", "qwen35moe", _experts(7, 3, 24, 36), _DELTA, {"nextn_predict_layers": 1}
    ),
    "qwen3next": _case("qwen3-next", "qwen3next", _experts(7, 3, 24, 36), _DELTA),
    "gpt-oss": _case(
        "gpt-oss-plain", "gpt-oss", _experts(5, 3, 40), _YARN, {"attention.sliding_window": 9}
    ),
    "smallthinker": _case(
        "smallthinker-windows",
        "smallthinker",
        _experts(6, 2, 24, gating_func=1),
        {"attention.sliding_window": 9},
    ),
}


# By the converter's names, which gguf-py does not map in all versions.
_DRAFT_NAMES = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "embed_tokens": "embed_tokens",
    "shared_head.head": "shared_head_head",
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
    layout: "stacked" experts, "merged" gate and up, or "split", a tensor an expert, as once; and
    then keys and values of latent attention in one.
    """
    _, arch, pairs_rows, keys = FILES[case]
    keys = keys | (changed_keys or {})
    config, checkpoint = read_config(path), Checkpoint(path)
    has_drafts = has_draft_layer(checkpoint, config)
    values = json.loads((path / "config.json").read_text())
    values = values.get("text_config", values)
    drafts = keys.get("nextn_predict_layers", 0)
    sizes = {
        "num_hidden_layers": config.num_layers + drafts,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
    }
    theta = {"rope.freq_base": config.ropes[0].theta}
    tensors = {
        _as_converted(name, config.num_layers): values
        for name, values in load_file(path / "model.safetensors").items()
    }
    parts = (
        *(".mlp.experts", ".mlp.gate.", ".mlp.router", ".mlp.shared", ".mlp.moe_statics"),
        *(".mixer.experts", ".mixer.gate.", ".mixer.shared", ".mlp.e_score"),
        *("_moe.", "_mlp.", "sinks", "visual.", "forward.experts.", "forward.gate.", "expert_bias"),
    )
    plain = {n: t for n, t in tensors.items() if not any(part in n for part in parts)}
    if config.tied_embeddings:
        plain.pop("lm_head.weight", None)
    extra: dict[str, np.ndarray] = {}
    layers = [(spec, tensor_names(config).of_layer(i)) for i, spec in enumerate(config.layers)]
    if has_drafts:
        draft = config.draft_layer()
        layers.append((draft.layers[0], tensor_names(draft).of_layer(0)))
    for layer, (spec, names) in enumerate(layers):
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
        if spec.attention.latent is not None and layout != "split":
            joined = plain.pop(f"model.{names.kv_b}.weight")
            joined = joined.reshape(spec.attention.num_heads, -1, joined.shape[1])
            keys_and_values = np.split(joined, [spec.attention.latent.plain_size], axis=1)
            found["attn_k_b.weight"] = keys_and_values[0].swapaxes(1, 2)
            found["attn_v_b.weight"] = keys_and_values[1]
        block = layer if layer == config.num_layers else tensor_names(config).blocks_of(layer)[1]
        extra |= {f"blk.{block}.{name}": np.ascontiguousarray(t) for name, t in found.items()}
    for ours, theirs in _DRAFT_NAMES.items():
        tensor = plain.pop(f"model.layers.{config.num_layers}.{ours}.weight", None)
        if tensor is not None:
            tensor = tensor + (config.norm_offset if tensor.ndim == 1 else 0)
            extra[f"blk.{config.num_layers}.nextn.{theirs}.weight"] = tensor
    if drafts and not has_drafts:
        extra[f"blk.{config.num_layers}.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    if arch == "hy_v3":
        extra = {name.replace("exp_probs_b.bias", "exp_probs_b"): t for name, t in extra.items()}
    change(extra)
    LlamaFile(
        values | sizes,
        plain,
        kinds=kinds or {},
        keys={f"{arch}.{key}": value for key, value in (theta | keys).items()},
        extra=extra,
        arch=arch,
        names_arch="dots1" if arch == "hy_v3" else "",  # not in every gguf-py
        pairs_rows=pairs_rows,
        adds_one=config.norm_offset == 1,
    ).write(path / "m.gguf")


def _as_converted(name: str, num_layers: int) -> str:
    """The name that llama.cpp's converter maps: those of layers that draft are like others'."""
    draft = f"model.layers.{num_layers}."
    named = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    named |= {"norm": "shared_head.norm", "layers.0": ""}
    if name.startswith("mtp."):
        own = next(one for one in named if name.startswith(f"mtp.{one}."))
        return (draft + named[own]).removesuffix(".") + name.removeprefix(f"mtp.{own}")
    return name.replace("language_model.", "")


def ffn_tensors(
    checkpoint: Checkpoint, layouts: Sequence[ExpertNames], spec: FfnSpec
) -> dict[str, np.ndarray]:
    """A layer's experts by GGUF's names; {} of a dense layer."""
    layout = layout_in(layouts, checkpoint)
    if layout is None or spec.router is None:
        return {}
    tensors, found = Tensors(checkpoint), {}
    experts = [expert_tensors(tensors, layout, spec, e) for e in range(spec.router.num_experts)]
    columns = list(zip(*experts, strict=True))
    roles = ("gate", "up", "down") if spec.has_gate else ("up", "", "down")
    for role, gate_up_down in zip(roles, columns[:3], strict=True):
        if role:
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
        found |= {f"ffn_{roles[0]}_shexp.weight": gate}
        found |= {"ffn_up_shexp.weight": up} if spec.has_gate else {}
        found["ffn_down_shexp.weight"] = tensors.of(layout.shared_down)
    if spec.router.gates_shared:
        found["ffn_gate_inp_shexp.weight"] = tensors.of(layout.shared_router)[0]
    return {name: tensor.float().numpy() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("case", "layout"), [*((case, "stacked") for case in FILES), ("deepseek2", "split")]
)
def test_gguf_logits_equal_transformers(case: str, layout: str, tmp_path: Path) -> None:
    make_tiny(FILES[case][0], tmp_path)
    write_gguf(tmp_path, case, layout)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    assert relative_difference(reference_logits(tmp_path / "m.gguf", IDS), expected) < 2e-5
    assert not left_out(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3-moe", {"mlp_only_layers": list(range(64))}),
        ("glm4-moe", {"first_k_dense_replace": 1 << 10}),
    ],
)
def test_dense_layers_alone_are_no_mixture(variant: str, changes: Keys, tmp_path: Path) -> None:
    assert read_config(make_tiny(variant, tmp_path)).experts is not None
    change_config(tmp_path, **changes)
    config = read_config(tmp_path)
    assert config.experts is None
    assert config.ffn_sizes == (config.ffn_size,) * config.num_layers
    storage = NeuronStorage("", config.ffn_size, config.ffn_size)
    system = SystemConfig(str(tmp_path))
    assert token_reads(None, system, config, storage).num_bytes > 0


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("dots1", {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        ("exaone-moe", {"architectures": ["ExaoneMoEForCausalLM"], "scoring_func": "sigmoid"}),
        ("bailing2", {"router_dtype": "fp32", "use_rmsnorm": True, "use_bias": False}),
        ("starcoder2", {"activation_function": "gelu", "norm_type": "layer_norm"}),
        ("cohere2", {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "layer_switch": 4}),
        (
            "hunyuan-moe",
            {
                "moe_topk": [3] * 3,
                "num_experts": [7] * 3,
                "moe_intermediate_size": [40] * 3,
                "num_shared_expert": [1] * 3,
                "routed_scaling_factor": False,
                "n_group": False,
            },
        ),
        (
            "nemotron-h",
            {
                "hybrid_override_pattern": "M-M*-MM-",
                "layers_block_type": None,
                "num_hidden_layers": 8,
                "partial_rotary_factor": 1.0,
            },
        ),
    ],
)
def test_keys_as_published(variant: str, changes: Keys, tmp_path: Path) -> None:
    """What makers' own files say beside, or otherwise than transformers writes it."""
    expected = read_config(make_tiny(variant, tmp_path))
    change_config(tmp_path, **changes)
    assert read_config(tmp_path) == expected


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
        ("turbosparse-mixtral", {"hidden_act": "silu"}, "hidden_act is 'silu'; not supported"),
    ],
)
def test_what_is_refused(variant: str, changes: Keys, said: str, tmp_path: Path) -> None:
    change_config(make_tiny(variant, tmp_path), **changes)
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


def test_experts_in_two_transposed_tensors(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE's are published; transformers writes them as it has them in memory."""
    make_tiny("qwen3-vl-moe", tmp_path)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, values in tensors.items():
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert relative_difference(reference_logits(tmp_path, IDS), expected) < 2e-5
