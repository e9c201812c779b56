"""The families of models that are supported: a new one is a file here and an entry in FAMILIES."""

from __future__ import annotations

from model.config.families.falcon import FALCON
from model.config.families.family import Family
from model.config.families.llama import LLAMA
from model.config.families.opt import OPT
from model.config.families.tensor_names import TensorNames
from model.config.model_config import ModelConfig

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, OPT, FALCON)}


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return what the model's tensors are called in a checkpoint, without its prefix."""
    return FAMILIES[config.family].tensor_names(config)
