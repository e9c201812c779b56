"""Shapes of random models, some by name, and their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hotcold.model.config.activations import ActivationFn
from hotcold.model.config.build import build_config
from hotcold.model.config.families import FAMILIES
from hotcold.model.errors import UsageError
from hotcold.numba_kernels.formats import FLOAT_FORMATS, WeightDtype

DTYPES = {kind.short: kind.name for kind in FLOAT_FORMATS.values()}


@dataclass(frozen=True)
class SyntheticShape:
    """The sizes of a model. All are counts; `context` is the number of positions.

    Falcon with one KV head is falcon-7b's architecture, with more it is falcon-40b's. `ffn` are the
    neurons of an expert where there are `experts`, `chosen` of which a token has. `skew` is the
    share of all choices that the half of the experts takes that is chosen most, and `kept` that of
    a token's experts which the token before it had, too.
    Source:  OLMoE's skew is 0.75 to 0.78; Qwen3-30B-A3B keeps 0.45
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
    activation: ActivationFn | None = None  # None: the family's
    density: float = 0.1  # mean share of active neurons, of an expert's for a token that chose it
    experts: int = 0
    chosen: int = 0
    skew: float = 0.77
    kept: float = 0.45


@dataclass(frozen=True)
class SyntheticFamily:
    """How config.json spells a family's shapes."""

    config_json: Callable[[SyntheticShape], dict[str, Any]]  # keys beside the common ones
    activation: ActivationFn = "silu"  # where none is given


def resolve_shape(name: str, changes: Mapping[str, Any]) -> SyntheticShape:
    """Return the named shape with `changes` (those not None) to its sizes.

    Sizes not given follow from changed ones: head_dim from hidden and heads, kv_heads from heads,
    unless the shape has but one.
    Errors:  UsageError for an unknown name or what the family cannot have, ConfigError for others
    """
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    base = SHAPES[name]
    given = {key: value for key, value in changes.items() if value is not None}
    heads, hidden = given.get("heads", base.heads), given.get("hidden", base.hidden)
    if given.keys() & {"hidden", "heads"}:
        given.setdefault("head_dim", hidden // heads)
    if given.keys() & {"family", "heads"} and base.kv_heads > 1:
        given.setdefault("kv_heads", heads)
    if given.get("family", base.family) != base.family:
        given.setdefault("activation", None)
    shape = replace(base, **given)
    config = build_config(config_json(shape, "float16"), source="config.json of this shape")
    router = config.experts and config.experts.router
    found = {
        "head_dim": config.head_dim,
        "kv_heads": config.num_kv_heads,
        "experts": router.num_experts if router else 0,
    }
    for size, value in found.items():
        given_value, option = getattr(shape, size), size.replace("_", "-")
        if given_value != value:
            raise UsageError(
                f"--{option} is {given_value}, but {shape.family} of this shape has {value}"
            )
    return shape


def config_json(shape: SyntheticShape, dtype: WeightDtype) -> dict[str, Any]:
    """Return config.json's content for transformers' model of the family.

    The end-of-text id is null: random models do not stop.
    """
    family = SYNTHETIC_FAMILIES[shape.family]
    shape = replace(shape, activation=shape.activation or family.activation)
    return {
        "architectures": [FAMILIES[shape.family].architectures[0]],
        "model_type": shape.family,
        **family.config_json(shape),
        "torch_dtype": dtype,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "bos_token_id": min(1, shape.vocab - 1),
        "eos_token_id": None,
    }


def _llama(shape: SyntheticShape, theta: float = 1e4, **others: Any) -> dict[str, Any]:
    return {
        "intermediate_size": shape.ffn,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        **others,
    }


def _qwen3_moe(shape: SyntheticShape) -> dict[str, Any]:
    own = {"moe_intermediate_size": shape.ffn, "norm_topk_prob": True, "rope_theta": 1e6}
    return _olmoe(shape) | own


def _olmoe(shape: SyntheticShape) -> dict[str, Any]:
    return _llama(shape, num_experts=shape.experts, num_experts_per_tok=shape.chosen)


def _mixtral(shape: SyntheticShape) -> dict[str, Any]:
    own = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen}
    return _llama(shape, 1e6, **own)


def _gpt_oss(shape: SyntheticShape) -> dict[str, Any]:
    """Every second layer has a window, as without `layer_types`; yarn stretches 4096 positions."""
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": max(1, shape.context // 32),
    }
    own = {"attention_bias": True, "sliding_window": 128, "rope_theta": 150_000.0}
    return _mixtral(shape) | own | {"rope_scaling": scaling}


def _smallthinker(shape: SyntheticShape) -> dict[str, Any]:
    """Layers 0, 4, 8, … have no window and no rope."""
    layout = [int(layer % 4 != 0) for layer in range(shape.layers)]
    return _llama(
        shape,
        1.5e6,
        moe_num_primary_experts=shape.experts,
        moe_num_active_primary_experts=shape.chosen,
        moe_ffn_hidden_size=shape.ffn,
        moe_primary_router_apply_softmax=False,
        moe_enable_early_router=True,
        rope_layout=layout,
        sliding_window_layout=layout,
        sliding_window_size=4096,
    )


def _cohere(shape: SyntheticShape) -> dict[str, Any]:
    return _llama(shape, logit_scale=1.0)


def _starcoder2(shape: SyntheticShape) -> dict[str, Any]:
    function = "gelu_pytorch_tanh" if shape.activation == "gelu_tanh" else shape.activation
    return _llama(shape, hidden_act=function, use_bias=True, sliding_window=4096)


def _opt(shape: SyntheticShape) -> dict[str, Any]:
    return {
        "ffn_dim": shape.ffn,
        "word_embed_proj_dim": shape.hidden,
        "activation_function": shape.activation,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }


def _falcon(shape: SyntheticShape) -> dict[str, Any]:
    is_grouped = shape.kv_heads > 1
    return {
        "ffn_hidden_size": shape.ffn,
        "num_kv_heads": shape.kv_heads,
        "activation": shape.activation,
        "multi_query": not is_grouped,
        "new_decoder_architecture": is_grouped,
        "tie_word_embeddings": True,
    }


# With dReLU, config.json names the gate's function, which applies to up, too.
_DRELU = {"hidden_act": "relu", "sliding_window": None}
SYNTHETIC_FAMILIES: dict[str, SyntheticFamily] = {
    "llama": SyntheticFamily(_llama, "relu"),
    "qwen3": SyntheticFamily(_llama),
    "bamboo": SyntheticFamily(lambda shape: _llama(shape) | _DRELU, "drelu"),
    "arcee": SyntheticFamily(_llama, "relu2"),
    "cohere": SyntheticFamily(_cohere),
    "cohere2": SyntheticFamily(_cohere),
    "starcoder2": SyntheticFamily(_starcoder2, "gelu_tanh"),
    "opt": SyntheticFamily(_opt, "relu"),
    "falcon": SyntheticFamily(_falcon, "relu"),
    "qwen3_moe": SyntheticFamily(_qwen3_moe),
    "olmoe": SyntheticFamily(_olmoe),
    "mixtral": SyntheticFamily(_mixtral),
    "turbosparsemixtral": SyntheticFamily(lambda shape: _mixtral(shape) | _DRELU, "drelu"),
    "gpt_oss": SyntheticFamily(_gpt_oss),
    "smallthinker": SyntheticFamily(_smallthinker, "relu"),
}
SHAPES: dict[str, SyntheticShape] = {
    "tiny": SyntheticShape("llama", 64, 256, 4, 2, 16, 256, 256, 2),
    "tiny-moe": SyntheticShape("qwen3_moe", 64, 64, 4, 2, 16, 256, 256, 2, experts=16, chosen=4),
    "llama-7b": SyntheticShape("llama", 4096, 11008, 32, 32, 128, 32000, 4096, 32),
    "llama-13b": SyntheticShape("llama", 5120, 13824, 40, 40, 128, 32000, 4096, 40),
    "llama-70b": SyntheticShape("llama", 8192, 28672, 64, 8, 128, 32000, 4096, 80),
    "qwen3-8b": SyntheticShape("qwen3", 4096, 12288, 32, 8, 128, 151936, 40960, 36),
    "bamboo-7b": SyntheticShape("bamboo", 4096, 14336, 32, 8, 128, 32064, 4096, 32),
    "afm-4.5b": SyntheticShape("arcee", 2560, 18432, 20, 4, 128, 128004, 4096, 36),
    "command-r-35b": SyntheticShape("cohere", 8192, 22528, 64, 64, 128, 256000, 131072, 40),
    "command-r7b": SyntheticShape("cohere2", 4096, 14336, 32, 8, 128, 256000, 132096, 32),
    "command-a-111b": SyntheticShape("cohere2", 12288, 36864, 96, 8, 128, 256000, 131072, 64),
    "starcoder2-15b": SyntheticShape("starcoder2", 6144, 24576, 48, 4, 128, 49152, 16384, 40),
    "opt-6.7b": SyntheticShape("opt", 4096, 16384, 32, 32, 128, 50272, 2048, 32),
    "opt-30b": SyntheticShape("opt", 7168, 28672, 56, 56, 128, 50272, 2048, 48),
    "opt-66b": SyntheticShape("opt", 9216, 36864, 72, 72, 128, 50272, 2048, 64),
    "falcon-7b-like": SyntheticShape("falcon", 4544, 18176, 71, 1, 64, 65024, 2048, 32),
    "falcon-40b-like": SyntheticShape("falcon", 8192, 32768, 128, 8, 64, 65024, 2048, 60),
    "qwen3-30b-a3b": SyntheticShape(
        "qwen3_moe", 2048, 768, 32, 4, 128, 151936, 40960, 48, experts=128, chosen=8
    ),
    "gpt-oss-20b": SyntheticShape(
        "gpt_oss", 2880, 2880, 64, 8, 64, 201088, 131072, 24, experts=32, chosen=4
    ),
    "smallthinker-21b": SyntheticShape(
        "smallthinker", 2560, 768, 28, 4, 128, 151936, 16384, 52, density=0.4, experts=64, chosen=6
    ),
    "mixtral-8x7b": SyntheticShape(
        "mixtral", 4096, 14336, 32, 8, 128, 32000, 32768, 32, experts=8, chosen=2
    ),
    "turbosparse-mixtral-47b": SyntheticShape(
        "turbosparsemixtral", 4096, 14336, 32, 8, 128, 32000, 32768, 32, experts=8, chosen=2
    ),
    "olmoe-1b-7b": SyntheticShape(
        "olmoe", 2048, 1024, 16, 16, 128, 50304, 4096, 16, experts=64, chosen=8
    ),
}
