"""Known models that are not supported: what they need, and what to use instead.

By model_type of config.json, or its architectures, or by general.architecture of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

_CAUSAL = "ForCausalLM"  # how most architectures end


class _Group(NamedTuple):
    needs: str
    instead: str
    models: dict[str, tuple[str, ...]]  # name -> its model_type and architecture


_GROUPS = (
    _Group(
        "chooses positions by an indexer",
        "DeepSeek-V3.1, GLM-4.7-Flash or gpt-oss-120b",
        {
            "DeepSeek-V3.2": ("deepseek_v32", "deepseek32"),
            "DeepSeek-V4": ("deepseek_v4", "deepseek4"),
            "GLM-5": ("glm_moe_dsa", "glm-dsa", "glm5_next", "glm5-next"),
            "Mistral Large 4": ("mistral_large4", "mistral_large4_text"),
            "MiniMax-M3": ("minimax_m3_vl", "minimax_m3", "minimax-m3"),
        },
    ),
    _Group(
        "has hyper-connections and chooses positions by an indexer",
        "Qwen3.6-35B-A3B",
        {"Qwen3.8-Flash-Next": ("qwen4_exp", "qwen4_exp_text", "qwen4exp")},
    ),
    _Group(
        "has layers of linear attention of its own kind",
        "Qwen3-Next or Qwen3.6-35B-A3B",
        {
            "Kimi-Linear": ("kimi_linear", "kimi-linear"),
            "Kimi-K3": ("kimi_k3", "kimi-k3"),
            "MiniMax-01": ("minimax", "minimax_text_01", "minimax-01"),
            "Ling 2.5 and 3": ("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v2_5"),
            "OLMo Hybrid": ("olmo_hybrid",),
        },
    ),
    _Group(
        "has layers of Mamba of its own kind",
        "Granite 4 or Nemotron 3 Nano",
        {
            "Falcon-H1": ("falcon_h1", "falcon-h1"),
            "Jamba": ("jamba",),
            "Mamba": ("mamba", "mamba2", "falcon_mamba"),
            "Bamba": ("bamba",),
            "Zamba2": ("zamba2",),
            "PLaMo 2": ("plamo2",),
        },
    ),
    _Group(
        "has recurrent layers in place of attention",
        "Qwen3",
        {"RWKV": ("rwkv", "rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7")},
    ),
    _Group(
        "has embeddings and activations of its own in each layer",
        "Gemma 4 or Gemma 3",
        {"Gemma 3n": ("gemma3n", "gemma3n_text")},
    ),
    _Group(
        "has attention in chunks, and weighs experts' inputs",
        "Mistral Small 3 or Qwen3-30B-A3B",
        {"Llama 4": ("llama4", "llama4_text")},
    ),
    _Group(
        "has an activation that is learned",
        "OLMo 3 or Qwen3",
        {"Apertus": ("apertus",)},
    ),
    _Group(
        "has a gate behind attention, and experts",
        "Qwen3.6-35B-A3B or gpt-oss",
        {
            "Laguna": ("laguna",),
            "Trinity": ("afmoe",),
            "Step 3.5": ("step3p5", "step3p7", "step35"),
        },
    ),
    _Group(
        "has values of another size than keys",
        "gpt-oss or Qwen3-30B-A3B",
        {"MiMo-V2": ("mimo_v2_flash", "mimo_v2", "mimo2")},
    ),
    _Group(
        "chooses experts in a way of its own",
        "Qwen3-30B-A3B or DeepSeek-V3.1",
        {
            "LongCat": ("longcat_flash", "longcat-flash"),
            "Phi-3.5-MoE": ("phimoe",),
            "Command A+": ("cohere2_moe", "cohere2moe"),
        },
    ),
    _Group(
        "has experts of an older kind",
        "Ling-mini-2.0",
        {"Ling 1": ("bailingmoe", "BailingMoeForCausalLM")},
    ),
    _Group(
        "has layers that read pictures among the others",
        "Qwen3-VL (its text model)",
        {"Llama 3.2 Vision": ("mllama",)},
    ),
)
_FOUND = {
    kind: f"{name} {group.needs}, which is not supported; use {group.instead} instead"
    for group in _GROUPS
    for name, kinds in group.models.items()
    for kind in kinds
}


def why_unsupported(kind: Any) -> str:
    """Say what the model of this kind needs, and what to use instead; "" of others."""
    return _FOUND.get(kind, "") if isinstance(kind, str) else ""


def nearest_known(kind: Any, known: Iterable[str]) -> str:
    """What to say of a name that is nowhere here: which one is meant, or where all are told."""
    bare = {one.removesuffix(_CAUSAL): one for one in known}
    nearest = get_close_matches(str(kind).removesuffix(_CAUSAL), bare, 1, cutoff=0.7)
    return f"did you mean {bare[nearest[0]]}?" if nearest else "README.md lists the families"
