"""The supported families of models: a new one is a file here and an entry in FAMILIES."""

from __future__ import annotations

from hotcold.model.config.families.cohere import COHERE, COHERE2
from hotcold.model.config.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    KIMI_K2,
    MISTRAL4,
)
from hotcold.model.config.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from hotcold.model.config.families.exaone4 import EXAONE4
from hotcold.model.config.families.falcon import FALCON
from hotcold.model.config.families.family import Family, GgufArchitecture
from hotcold.model.config.families.gemma import GEMMA2, GEMMA3
from hotcold.model.config.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from hotcold.model.config.families.glm4 import GLM4
from hotcold.model.config.families.glm4_moe import GLM4_MOE
from hotcold.model.config.families.gpt_oss import GPT_OSS
from hotcold.model.config.families.granite import (
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_HYBRID,
    GRANITE_MOE_SHARED,
)
from hotcold.model.config.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from hotcold.model.config.families.lfm2 import LFM2, LFM2_MOE
from hotcold.model.config.families.llama import LLAMA, SPARSE_LLAMA
from hotcold.model.config.families.minicpm import MINICPM
from hotcold.model.config.families.minimax_m2 import MINIMAX_M2
from hotcold.model.config.families.mistral import BAMBOO, MINISTRAL3, MISTRAL
from hotcold.model.config.families.mixtral import MIXTRAL, TURBOSPARSE_MIXTRAL
from hotcold.model.config.families.nemotron_h import NEMOTRON_H
from hotcold.model.config.families.olmo2 import OLMO2, OLMO3
from hotcold.model.config.families.opt import OPT
from hotcold.model.config.families.phi3 import PHI3
from hotcold.model.config.families.qwen import QWEN2, QWEN3
from hotcold.model.config.families.qwen_moe import OLMOE, QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE
from hotcold.model.config.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from hotcold.model.config.families.routed import BAILING2, DOTS1, EXAONE_MOE, HY3, SOLAR_OPEN
from hotcold.model.config.families.seed_oss import SEED_OSS
from hotcold.model.config.families.smallthinker import SMALLTHINKER
from hotcold.model.config.families.smollm3 import SMOLLM3
from hotcold.model.config.families.squared_relu import ARCEE, NEMOTRON
from hotcold.model.config.families.starcoder2 import STARCODER2
from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.model_config import ModelConfig

_ALL = (
    *(LLAMA, SPARSE_LLAMA, OPT, FALCON),
    *(MISTRAL, MINISTRAL3, BAMBOO, QWEN2, QWEN3),
    *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, PHI3, OLMO2, OLMO3, SMOLLM3),
    *(GRANITE, GLM4, ERNIE4_5, SEED_OSS, EXAONE4, HUNYUAN),
    *(COHERE, COHERE2, STARCODER2),
    *(ARCEE, NEMOTRON, NEMOTRON_H, MINICPM),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LFM2, LFM2_MOE),
    *(QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE, OLMOE, MIXTRAL, TURBOSPARSE_MIXTRAL),
    *(GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_HYBRID, ERNIE4_5_MOE),
    *(GLM4_MOE, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE, KIMI_K2, MISTRAL4),
    *(HUNYUAN_MOE, DOTS1, SOLAR_OPEN, HY3, EXAONE_MOE, BAILING2),
    *(MINIMAX_M2, GPT_OSS, SMALLTHINKER),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
# By general.architecture of a GGUF file. Of families that are others by another name the first.
GGUF_ARCHITECTURES: dict[str, tuple[Family, GgufArchitecture]] = {
    kind: (family, family.gguf)
    for family in reversed(_ALL)
    if family.gguf is not None
    for kind in family.gguf.kinds
}
# Checkpoints of one family use any of these for the same tensor.
PREFIXES = tuple(
    dict.fromkeys(["", *(prefix for family in FAMILIES.values() for prefix in family.prefixes)])
)


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return the names of the model's tensors in a checkpoint, without the family's prefix."""
    names = FAMILIES[config.family].tensor_names
    found = names(config) if callable(names) else names
    return found.of_draft(config.drafts_after) if config.drafts_after else found
