"""The supported families of models: a new one is a file here and an entry in FAMILIES."""

from __future__ import annotations

from hotcold.model.config.families.falcon import FALCON
from hotcold.model.config.families.family import Family
from hotcold.model.config.families.gemma import GEMMA2, GEMMA3
from hotcold.model.config.families.glm4_moe import GLM4_MOE
from hotcold.model.config.families.gpt_oss import GPT_OSS
from hotcold.model.config.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from hotcold.model.config.families.llama import LLAMA, SPARSE_LLAMA
from hotcold.model.config.families.minicpm import MINICPM
from hotcold.model.config.families.mistral import BAMBOO, MISTRAL
from hotcold.model.config.families.mixtral import MIXTRAL, TURBOSPARSE_MIXTRAL
from hotcold.model.config.families.olmo2 import OLMO2
from hotcold.model.config.families.opt import OPT
from hotcold.model.config.families.phi3 import PHI3
from hotcold.model.config.families.qwen import QWEN2, QWEN3
from hotcold.model.config.families.qwen_moe import OLMOE, QWEN2_MOE, QWEN3_MOE
from hotcold.model.config.families.smallthinker import SMALLTHINKER
from hotcold.model.config.families.smollm3 import SMOLLM3
from hotcold.model.config.families.squared_relu import ARCEE, NEMOTRON
from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.model_config import ModelConfig

_ALL = (
    *(LLAMA, SPARSE_LLAMA, OPT, FALCON),
    *(MISTRAL, BAMBOO, QWEN2, QWEN3),
    *(GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3),
    *(ARCEE, NEMOTRON, MINICPM),
    *(QWEN2_MOE, QWEN3_MOE, OLMOE, MIXTRAL, TURBOSPARSE_MIXTRAL),
    *(GRANITE_MOE, GRANITE_MOE_SHARED, GLM4_MOE, GPT_OSS, SMALLTHINKER),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return the names of the model's tensors in a checkpoint, without the family's prefix."""
    names = FAMILIES[config.family].tensor_names
    return names(config) if callable(names) else names
