"""How many neurons of a kind of model fire, by those who made such models.

hidden_act      who measured                                             share that fires
relu, llama     ReLU Llamas 7B, 13B and 70B (PowerInfer, section 8)      0.30, 0.22, 0.18
fatrelu, llama  ProSparse-Llama-2 7B and 13B (arXiv 2402.13516)          0.107, 0.112
fatrelu,minicpm MiniCPM-S-1B (arXiv 2402.13516)                          0.121
drelu, bamboo   Bamboo-7B: same perplexity with the largest 12% (README) 0.12
relu, opt       OPT, 6.7B and more (PowerInfer, section 8)               0.03
relu, falcon    ReLU Falcon 40B (PowerInfer, section 8)                  0.05
"""

from __future__ import annotations

from hotcold.model.config.model_config import ModelConfig

# Families that another reads are called like it, Bamboo's checkpoints mistral for one.
_SHARES = {
    ("llama", "relu"): 0.30,
    ("llama", "fatrelu"): 0.11,
    ("minicpm", "fatrelu"): 0.12,
    ("bamboo", "drelu"): 0.12,
    ("opt", "relu"): 0.03,
    ("falcon", "relu"): 0.05,
}


def published_firing_share(config: ModelConfig) -> float | None:
    """The share of a layer's neurons that fires at a token; None where nobody measured it."""
    return _SHARES.get((config.family, config.activation_fn))
