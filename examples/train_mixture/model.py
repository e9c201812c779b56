"""A small mixture in SmallThinker's layout: ReGLU experts, and a router before attention.

It is a Llama whose FFN is experts. The router reads a layer's input, before attention and without a
norm, takes the largest sigmoids, and divides them by their sum.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

NUM_EXPERTS, NUM_CHOSEN = 32, 4
_INIT_STD = 0.02
_HERE, _THERE = ".mlp.", ".block_sparse_moe."


def mixture_config(vocab_size: int, bos_id: int, eos_id: int, pad_id: int) -> LlamaConfig:
    """32 million parameters, 7.5 million of them a token's; `intermediate_size` is an expert's."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="relu",
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        attn_implementation="sdpa",
        num_experts=NUM_EXPERTS,
        num_chosen=NUM_CHOSEN,
    )


class Expert(nn.Module):
    """down(relu(gate x) * up x)."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, size, bias=False)
        self.up = nn.Linear(hidden, size, bias=False)
        self.down = nn.Linear(size, hidden, bias=False)
        self.act_fn = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """x and the result (tokens, hidden)."""
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A layer's router and experts. `route` comes first, with what the layer gets."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.intermediate_size)
        self.num_chosen = config.num_chosen
        self.primary_router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(*sizes) for _ in range(config.num_experts))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_INIT_STD)
        self.chosen = self.weights = self.logits = torch.empty(0)

    def route(self, layer_input: Tensor) -> None:
        """Choose experts: `chosen` and `weights` (tokens, k) by `logits` (tokens, E)."""
        self.logits = functional.linear(
            layer_input.flatten(0, -2).float(), self.primary_router.weight.float()
        )
        chosen = self.logits.topk(self.num_chosen, dim=-1)
        self.chosen, weights = chosen.indices, chosen.values.sigmoid()
        self.weights = weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result (..., hidden)."""
        tokens = x.flatten(0, -2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (self.chosen == number).nonzero(as_tuple=True)
            if len(rows):
                weight = self.weights[rows, places, None].to(tokens.dtype)
                out = out.index_add(0, rows, expert(tokens[rows]) * weight)
        return out.view_as(x)

    def balance(self) -> Tensor:
        """1 where all experts are used alike, more where few are.

        experts * sum over experts e of (share of the choices of e) * (mean of its softmax)
        Source:  Switch Transformers, section 2.2
        """
        counts = torch.bincount(self.chosen.flatten(), minlength=len(self.experts))
        shares = counts.float() / counts.sum()
        return len(self.experts) * (shares * self.logits.softmax(-1).mean(0)).sum()


class MixtureLayer(LlamaDecoderLayer):
    """A layer of Llama, whose FFN is experts that are chosen first."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = Experts(config)

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        """As Llama's, after the routing."""
        self.mlp.route(hidden_states)
        return super().forward(hidden_states, **rest)


class MixtureForCausalLM(LlamaForCausalLM):
    """The whole model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layers = (MixtureLayer(config, number) for number in range(config.num_hidden_layers))
        self.model.layers = nn.ModuleList(layers)
        for layer in self.model.layers:
            for module in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
                module.apply(self._init_weights)


def balance_loss(model: LlamaForCausalLM, weight: float) -> Tensor:
    """How unevenly the last forward pass used experts, over all layers."""
    return weight * torch.stack([layer.mlp.balance() for layer in model.model.layers]).sum()


def save_mixture(model: MixtureForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json (greedy) and model.safetensors in float16."""
    tensors = {
        name.replace(_HERE, _THERE): tensor.half().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    ids = {f"{name}_token_id": getattr(model.config, f"{name}_token_id") for name in _TOKENS}
    _write_json(out / "config.json", _published_config(model.config) | ids)
    _write_json(out / "generation_config.json", {"do_sample": False} | ids)


def load_mixture(folder: Path) -> MixtureForCausalLM:
    """Read in float32 what `save_mixture` wrote."""
    values = json.loads((folder / "config.json").read_text())
    config = mixture_config(values["vocab_size"], *(values[f"{t}_token_id"] for t in _TOKENS))
    config.update(
        {
            "hidden_size": values["hidden_size"],
            "intermediate_size": values["moe_ffn_hidden_size"],
            "num_hidden_layers": values["num_hidden_layers"],
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_key_value_heads"],
            "head_dim": values["head_dim"],
            "max_position_embeddings": values["max_position_embeddings"],
            "num_experts": values["moe_num_primary_experts"],
            "num_chosen": values["moe_num_active_primary_experts"],
        }
    )
    model = MixtureForCausalLM(config)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace(_THERE, _HERE): tensor.float() for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.eval()


_TOKENS = ("bos", "eos", "pad")


def _published_config(config: LlamaConfig) -> dict[str, object]:
    layers = config.num_hidden_layers
    return {
        "architectures": ["SmallThinkerForCausalLM"],
        "model_type": "smallthinker",
        "torch_dtype": "float16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_layout": [1] * layers,
        "sliding_window_layout": [0] * layers,
        "moe_layer_layout": [1] * layers,
        "moe_num_primary_experts": config.num_experts,
        "moe_num_active_primary_experts": config.num_chosen,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_primary_router_apply_softmax": False,
        "moe_enable_early_router": True,
        "tie_word_embeddings": True,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
