"""Models that transformers has no code for, as its own with a few modules changed.

Their published code is that of Llama or Mistral, with these changes: FATReLU of ProSparse and
MiniCPM-S, dReLU of Bamboo, the scales of MiniCPM, experts of SmallThinker and TurboSparse-Mixtral.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedModel

    Tensors = dict[str, torch.Tensor]


def load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint, by transformers, changed where its config.json says so."""
    import torch
    import transformers

    values = json.loads((path / "config.json").read_text())
    if values["model_type"] in _MIXTURES:
        return _with_experts(path, values, dtype)
    if values["model_type"] == "bailing_moe":
        return _of_names(path, values, dtype)
    patch = _PATCHES.get(values["model_type"])
    if patch is None:
        # Other attention than "eager" leaves softcaps out in some versions.
        eager = {"attn_implementation": "eager"}
        named = getattr(transformers, values["architectures"][0])
        return named.from_pretrained(path, dtype=dtype, **eager).eval()
    kind, change = patch
    model = _of_kind(kind, path, {**values, "hidden_act": "relu"}, dtype)
    for layer in model.model.layers:
        if values["hidden_act"] == "fatrelu":
            layer.mlp.act_fn = torch.nn.Threshold(values["hidden_act_param"], 0.0)
    change(model, values)
    return model


def _of_kind(kind: str, path: Path, values: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's tensors in a class of transformers, configured by these values."""
    import transformers

    known = {"architectures": None, "model_type": values.get("base_type", kind.lower())}
    config = getattr(transformers, f"{kind}Config").from_dict({**values, **known})
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model: PreTrainedModel = model_class.from_pretrained(path, config=config, dtype=dtype).eval()
    return model


_BAILING_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}


def bailing_tensors(tensors: Tensors, back: bool = False) -> Tensors:
    """GLM-4.5's tensors with the names of Ling 2, q, k and v as one; or those again."""
    import torch

    def renamed(name: str) -> str:
        for theirs, ours in _BAILING_NAMES.items():
            name = name.replace(ours, theirs) if back else name.replace(theirs, ours)
        return name

    found = {renamed(name): tensor for name, tensor in tensors.items()}
    fused, parts = "attention.query_key_value", [f"self_attn.{one}_proj" for one in "qkv"]
    for name in list(found):
        if not back and parts[0] in name:
            own = [found.pop(name.replace(parts[0], part)) for part in parts]
            found[name.replace(parts[0], fused)] = torch.cat(own)
        elif back and fused in name:
            kv_rows = 2 * 20
            rows = [len(found[name]) - 2 * kv_rows, kv_rows, kv_rows]
            for part, own in zip(parts, found.pop(name).split(rows), strict=True):
                found[name.replace(fused, part)] = own.contiguous()
    return found


def _of_names(path: Path, values: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    from tempfile import TemporaryDirectory

    from safetensors.torch import load_file, save_file

    with TemporaryDirectory() as folder:
        copytree(path, folder, dirs_exist_ok=True)
        tensors = bailing_tensors(load_file(path / "model.safetensors"), back=True)
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = _of_kind("Glm4Moe", Path(folder), {**values, "base_type": "glm4_moe"}, dtype)
    return model


def _as_it_is(model: PreTrainedModel, values: dict[str, Any]) -> None:
    pass


def _bamboo(model: PreTrainedModel, values: dict[str, Any]) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, inputs, output: output.relu())


def _minicpm(model: PreTrainedModel, values: dict[str, Any]) -> None:
    depth = values["scale_depth"] / values["num_hidden_layers"] ** 0.5
    width = values["hidden_size"] / values["dim_model_base"]
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output * values["scale_emb"]
    )
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, inputs, output: output * depth)
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / width,))


def _with_experts(path: Path, values: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """SmolLM3 or Mistral, whose FFNs are the checkpoint's experts instead."""
    from safetensors.torch import load_file

    kind = _MIXTURES[values["model_type"]]
    known: dict[str, Any] = {"intermediate_size": 8}  # of FFNs that are replaced
    known["pad_token_id"] = None  # SmolLM3's own may be no token here
    if kind == "SmolLM3":
        layout = values.get("sliding_window_layout") or [0] * values["num_hidden_layers"]
        known["no_rope_layers"] = values.get("rope_layout") or [1] * values["num_hidden_layers"]
        known["layer_types"] = [("full", "sliding")[has] + "_attention" for has in layout]
        known["use_sliding_window"] = any(layout)
        known["sliding_window"] = values["sliding_window_size"] if any(layout) else None
    model = _of_kind(kind, path, {**values, **known}, dtype)
    tensors = {
        name: value.to(dtype) for name, value in load_file(path / "model.safetensors").items()
    }
    for i, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{i}.block_sparse_moe."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        _use_experts(layer, own, values, is_early=kind == "SmolLM3")
    return model


def _use_experts(
    layer: Any, own: dict[str, torch.Tensor], values: dict[str, Any], is_early: bool
) -> None:
    """Token by token, as the models' own code says, in its words."""
    import torch

    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def of_token(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        if is_early:
            count = values["moe_num_active_primary_experts"]
            top = torch.topk(own["primary_router.weight"] @ before, count)
            weights = top.values.sigmoid() / top.values.sigmoid().sum()
            if values.get("moe_primary_router_apply_softmax"):
                weights = top.values.softmax(0)
            names = ("gate", "up", "down")
        else:
            top = torch.topk((own["gate.weight"] @ x).softmax(0), values["num_experts_per_tok"])
            weights = top.values / top.values.sum()
            names = ("w1", "w3", "w2")
        out = torch.zeros_like(x)
        for weight, expert in zip(weights, top.indices.tolist(), strict=True):
            gate, up, down = (own[f"experts.{expert}.{name}.weight"] for name in names)
            if is_early:
                out += weight * (down @ ((gate @ x).relu() * (up @ x)))
                continue
            fc1, fc2 = (own[f"experts.{expert}.predictor.fc{i}.weight"] for i in (1, 2))
            mask = torch.round((fc2 @ (fc1 @ x).relu()).sigmoid())
            out += weight * (down @ ((gate @ x).relu() * (up @ x).relu() * mask))
        return out

    def forward(x: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.flatten(0, 1), seen.pop().flatten(0, 1), strict=True)
        return torch.stack([of_token(*pair) for pair in pairs]).view_as(x)

    layer.mlp.forward = forward


_MIXTURES = {"smallthinker": "SmolLM3", "turbosparsemixtral": "Mistral"}  # what they are made of
_PATCHES: dict[str, tuple[str, Callable[[PreTrainedModel, dict[str, Any]], None]]] = {
    "sparsellama": ("Llama", _as_it_is),
    "bamboo": ("Mistral", _bamboo),
    "minicpm": ("Llama", _minicpm),
}
