"""Models that transformers has no code for, as its own with a few modules changed.

Their published code is that of Llama or Mistral, with these changes: FATReLU of ProSparse and
MiniCPM-S, dReLU of Bamboo, the scales of MiniCPM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedModel


def load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint, by transformers, changed where its config.json says so."""
    from transformers import AutoModelForCausalLM

    values = json.loads((path / "config.json").read_text())
    patch = _PATCHES.get(values["model_type"])
    if patch is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    kind, change = patch
    known = {"model_type": kind, "architectures": None, "hidden_act": "relu"}
    config = _config_class(kind).from_dict({**values, **known})
    model = _model_class(kind).from_pretrained(path, config=config, dtype=dtype).eval()
    for layer in model.model.layers:
        if values["hidden_act"] == "fatrelu":
            layer.mlp.act_fn = _fatrelu(values["hidden_act_param"])
    change(model, values)
    return model


def _config_class(kind: str) -> Any:
    from transformers import LlamaConfig, MistralConfig

    return {"llama": LlamaConfig, "mistral": MistralConfig}[kind]


def _model_class(kind: str) -> Any:
    from transformers import LlamaForCausalLM, MistralForCausalLM

    return {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM}[kind]


def _fatrelu(threshold: float) -> Any:
    import torch

    return torch.nn.Threshold(threshold, 0.0)


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


_PATCHES: dict[str, tuple[str, Callable[[PreTrainedModel, dict[str, Any]], None]]] = {
    "sparsellama": ("llama", _as_it_is),
    "bamboo": ("mistral", _bamboo),
    "minicpm": ("llama", _minicpm),
}
