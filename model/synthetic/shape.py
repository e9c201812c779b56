"""Shapes of random models, some by name, and their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hotcold.model.config.activations import ActivationFn
from hotcold.model.config.families import FAMILIES
from hotcold.model.errors import UsageError
from hotcold.numba_kernels.formats import FLOAT_FORMATS, WeightDtype

DTYPES = {kind.short: kind.name for kind in FLOAT_FORMATS.values()}
_NORM_EPS = 1e-5
_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class SyntheticShape:
    """The sizes of a model. All are counts; `context` is the number of positions.

    Falcon with one KV head is falcon-7b's architecture, with more it is falcon-40b's. `ffn` are the
    neurons of an expert where there are `experts`, `chosen` of which a token has. `skew` is the
    share of all choices that the half of the experts takes that is chosen most, and `kept` that of
    a token's experts which the token before it had, too.
    Source:  OLMoE's skew is 0.75 to 0.78; Qwen3-30B-A3B keeps 0.45
    Errors:  UsageError for sizes that the family cannot have
    """

    family: str  # a key of SYNTHETIC_FAMILIES
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    layers: int
    activation: ActivationFn = "relu"
    density: float = 0.1  # mean share of active neurons, of an expert's for a token that chose it
    experts: int = 0
    chosen: int = 0
    skew: float = 0.77
    kept: float = 0.45

    def __post_init__(self) -> None:
        self._require_experts()
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_of_experts = entry.name in ("experts", "chosen")
            if isinstance(value, int) and value < 1 and not (is_of_experts and not self.experts):
                raise UsageError(
                    f"--{entry.name.replace('_', '-')} must be at least 1, not {value}"
                )
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        family = SYNTHETIC_FAMILIES[self.family]
        if not family.free_head_dim and self.heads * self.head_dim != self.hidden:
            raise UsageError(
                f"{self.family} needs heads * head-dim = hidden, not "
                f"{self.heads} * {self.head_dim} = {self.hidden}"
            )
        if not family.shares_kv_heads and self.heads != self.kv_heads:
            raise UsageError(f"{self.family} has no grouped KV heads: leave --kv-heads out")
        if family.rotates and self.head_dim % 2:
            raise UsageError(f"{self.family} rotates pairs: --head-dim {self.head_dim} is odd")

    def _require_experts(self) -> None:
        if SYNTHETIC_FAMILIES[self.family].has_experts != (self.experts != 0):
            kind = "has" if self.experts == 0 else "has no"
            raise UsageError(f"{self.family} {kind} experts, but --experts is {self.experts}")
        if self.chosen > self.experts:
            raise UsageError(f"--chosen is {self.chosen}, but there are {self.experts} experts")
        if not 0.5 <= self.skew <= 1:
            raise UsageError(f"--skew must be between 0.5 and 1, not {self.skew}")
        if not 0 <= self.kept <= 1:
            raise UsageError(f"--kept must be between 0 and 1, not {self.kept}")


@dataclass(frozen=True)
class SyntheticFamily:
    """How config.json spells a family's shapes, and which shapes it can have."""

    config_json: Callable[[SyntheticShape], dict[str, Any]]  # keys beside the common ones
    has_gate: bool = True
    rotates: bool = True
    free_head_dim: bool = True
    shares_kv_heads: bool = True
    multi_query: bool = False  # has one KV head where no number is given
    activation: ActivationFn = "relu"  # where none is given
    has_experts: bool = False


def resolve_shape(name: str, changes: Mapping[str, Any]) -> SyntheticShape:
    """Return the named shape with `changes` (those not None) to its sizes.

    Sizes not given follow from changed ones: head_dim from hidden and heads, ffn of a model without
    gate from hidden, kv_heads from heads.
    Errors:  UsageError for an unknown name or impossible sizes
    """
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    base = SHAPES[name]
    given = {key: value for key, value in changes.items() if value is not None}
    family = SYNTHETIC_FAMILIES[given.get("family", base.family)]
    heads = given.get("heads", base.heads)
    hidden = given.get("hidden", base.hidden)
    if given.keys() & {"hidden", "heads"} and heads > 0:
        given.setdefault("head_dim", hidden // heads)
    if "family" in given:
        given.setdefault("activation", family.activation)
    if given.keys() & {"family", "heads"}:
        given.setdefault("kv_heads", 1 if family.multi_query else heads)
    if "hidden" in given and not family.has_gate:
        given.setdefault("ffn", 4 * hidden)
    return replace(base, **given)


def config_json(shape: SyntheticShape, dtype: WeightDtype) -> dict[str, Any]:
    """Return config.json's content for transformers' model of the family.

    The end-of-text id is null: random models do not stop.
    """
    common = {
        "torch_dtype": dtype,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "bos_token_id": min(1, shape.vocab - 1),
        "eos_token_id": None,
        "use_cache": True,
    }
    architecture = FAMILIES[shape.family].architectures[0]
    own = {"architectures": [architecture], "model_type": shape.family}
    return own | SYNTHETIC_FAMILIES[shape.family].config_json(shape) | common


def generation_config_json(shape: SyntheticShape) -> dict[str, Any]:
    """Return generation_config.json's content: greedy, no end."""
    return {"bos_token_id": min(1, shape.vocab - 1), "eos_token_id": None, "do_sample": False}


def _llama(shape: SyntheticShape) -> dict[str, Any]:
    return {
        "intermediate_size": shape.ffn,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "rms_norm_eps": _NORM_EPS,
        "rope_theta": _ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _mixture(shape: SyntheticShape, theta: float) -> dict[str, Any]:
    return _llama(shape) | {"num_experts_per_tok": shape.chosen, "rope_theta": theta}


def _qwen3_moe(shape: SyntheticShape) -> dict[str, Any]:
    return _mixture(shape, 1e6) | {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
    }


def _olmoe(shape: SyntheticShape) -> dict[str, Any]:
    return _mixture(shape, 1e4) | {"num_experts": shape.experts, "norm_topk_prob": False}


def _mixtral(shape: SyntheticShape) -> dict[str, Any]:
    return _mixture(shape, 1e6) | {"num_local_experts": shape.experts, "sliding_window": None}


def _gate_alone(config: dict[str, Any]) -> dict[str, Any]:
    """TurboSparse's config.json names the gate's function, which applies to up, too."""
    return config | {"hidden_act": "relu", "sliding_window": None}


def _gpt_oss(shape: SyntheticShape) -> dict[str, Any]:
    """Every second layer has a window; yarn stretches 4096 positions."""
    kinds = ("sliding_attention", "full_attention")
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": max(1, shape.context // 32),
    }
    return _mixture(shape, 150_000.0) | {
        "num_local_experts": shape.experts,
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": [kinds[layer % 2] for layer in range(shape.layers)],
        "rope_scaling": scaling,
    }


def _smallthinker(shape: SyntheticShape) -> dict[str, Any]:
    """Layers 0, 4, 8, … have no window and no rope."""
    layout = [int(layer % 4 != 0) for layer in range(shape.layers)]
    values = _mixture(shape, 1.5e6) | {
        "moe_num_primary_experts": shape.experts,
        "moe_num_active_primary_experts": shape.chosen,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_primary_router_apply_softmax": False,
        "moe_enable_early_router": True,
        "moe_layer_layout": [1] * shape.layers,
        "rope_layout": layout,
        "sliding_window_layout": layout,
        "sliding_window_size": 4096,
        "rms_norm_eps": 1e-6,
    }
    del values["num_experts_per_tok"], values["intermediate_size"]
    return values


def _cohere(shape: SyntheticShape) -> dict[str, Any]:
    return _llama(shape) | {"layer_norm_eps": _NORM_EPS, "logit_scale": 1.0, "use_qk_norm": False}


def _starcoder2(shape: SyntheticShape) -> dict[str, Any]:
    return _llama(shape) | {
        "hidden_act": shape.activation.replace("gelu_tanh", "gelu_pytorch_tanh"),
        "norm_epsilon": _NORM_EPS,
        "use_bias": True,
        "sliding_window": 4096,
    }


def _opt(shape: SyntheticShape) -> dict[str, Any]:
    return {
        "ffn_dim": shape.ffn,
        "word_embed_proj_dim": shape.hidden,
        "activation_function": shape.activation,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }


def _falcon(shape: SyntheticShape) -> dict[str, Any]:
    is_grouped = shape.kv_heads > 1
    return {
        "ffn_hidden_size": shape.ffn,
        "num_kv_heads": shape.kv_heads,
        "activation": shape.activation,
        "layer_norm_epsilon": _NORM_EPS,
        "rope_theta": _ROPE_THETA,
        "alibi": False,
        "bias": False,
        "multi_query": not is_grouped,
        "new_decoder_architecture": is_grouped,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    }


SYNTHETIC_FAMILIES: dict[str, SyntheticFamily] = {
    "llama": SyntheticFamily(_llama),
    "qwen3": SyntheticFamily(_llama, activation="silu"),
    "bamboo": SyntheticFamily(lambda shape: _gate_alone(_llama(shape)), activation="drelu"),
    "arcee": SyntheticFamily(_llama, has_gate=False, activation="relu2"),
    "cohere": SyntheticFamily(_cohere, free_head_dim=False, activation="silu"),
    "cohere2": SyntheticFamily(_cohere, activation="silu"),
    "starcoder2": SyntheticFamily(
        _starcoder2, has_gate=False, free_head_dim=False, activation="gelu_tanh"
    ),
    "opt": SyntheticFamily(
        _opt, has_gate=False, rotates=False, free_head_dim=False, shares_kv_heads=False
    ),
    "falcon": SyntheticFamily(_falcon, has_gate=False, free_head_dim=False, multi_query=True),
    "qwen3_moe": SyntheticFamily(_qwen3_moe, activation="silu", has_experts=True),
    "olmoe": SyntheticFamily(_olmoe, free_head_dim=False, activation="silu", has_experts=True),
    "mixtral": SyntheticFamily(_mixtral, activation="silu", has_experts=True),
    "turbosparsemixtral": SyntheticFamily(
        lambda shape: _gate_alone(_mixtral(shape)), activation="drelu", has_experts=True
    ),
    "gpt_oss": SyntheticFamily(_gpt_oss, activation="silu", has_experts=True),
    "smallthinker": SyntheticFamily(_smallthinker, has_experts=True),
}


def _shape(family: str, *sizes: Any, **more: Any) -> SyntheticShape:
    """A shape with its family's activation."""
    shape = SyntheticShape(family, *sizes, **more)
    return replace(shape, activation=SYNTHETIC_FAMILIES[family].activation)


SHAPES: dict[str, SyntheticShape] = {
    "tiny": _shape("llama", 64, 256, 4, 2, 16, 256, 256, 2),
    "tiny-moe": _shape("qwen3_moe", 64, 64, 4, 2, 16, 256, 256, 2, experts=16, chosen=4),
    "llama-7b": _shape("llama", 4096, 11008, 32, 32, 128, 32000, 4096, 32),
    "llama-13b": _shape("llama", 5120, 13824, 40, 40, 128, 32000, 4096, 40),
    "llama-70b": _shape("llama", 8192, 28672, 64, 8, 128, 32000, 4096, 80),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 32, 8, 128, 151936, 40960, 36),
    "bamboo-7b": _shape("bamboo", 4096, 14336, 32, 8, 128, 32064, 4096, 32),
    "afm-4.5b": _shape("arcee", 2560, 18432, 20, 4, 128, 128004, 4096, 36),
    "command-r-35b": _shape("cohere", 8192, 22528, 64, 64, 128, 256000, 131072, 40),
    "command-r7b": _shape("cohere2", 4096, 14336, 32, 8, 128, 256000, 132096, 32),
    "command-a-111b": _shape("cohere2", 12288, 36864, 96, 8, 128, 256000, 131072, 64),
    "starcoder2-15b": _shape("starcoder2", 6144, 24576, 48, 4, 128, 49152, 16384, 40),
    "opt-6.7b": _shape("opt", 4096, 16384, 32, 32, 128, 50272, 2048, 32),
    "opt-30b": _shape("opt", 7168, 28672, 56, 56, 128, 50272, 2048, 48),
    "opt-66b": _shape("opt", 9216, 36864, 72, 72, 128, 50272, 2048, 64),
    "falcon-7b-like": _shape("falcon", 4544, 18176, 71, 1, 64, 65024, 2048, 32),
    "falcon-40b-like": _shape("falcon", 8192, 32768, 128, 8, 64, 65024, 2048, 60),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 2048, 768, 32, 4, 128, 151936, 40960, 48, experts=128, chosen=8
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss", 2880, 2880, 64, 8, 64, 201088, 131072, 24, experts=32, chosen=4
    ),
    "smallthinker-21b": _shape(
        "smallthinker", 2560, 768, 28, 4, 128, 151936, 16384, 52, density=0.4, experts=64, chosen=6
    ),
    "mixtral-8x7b": _shape(
        "mixtral", 4096, 14336, 32, 8, 128, 32000, 32768, 32, experts=8, chosen=2
    ),
    "turbosparse-mixtral-47b": _shape(
        "turbosparsemixtral", 4096, 14336, 32, 8, 128, 32000, 32768, 32, experts=8, chosen=2
    ),
    "olmoe-1b-7b": _shape("olmoe", 2048, 1024, 16, 16, 128, 50304, 4096, 16, experts=64, chosen=8),
}
