"""config.json: what is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.model.config.build import build_config
from hotcold.model.config.model_config import RopeConfig
from tests.unit.family_configs import (
    BAMBOO,
    FALCON,
    GEMMA3,
    LLAMA,
    LLAMA3,
    LONGROPE,
    PHI3,
    QWEN3,
    SMOLLM3,
    YARN,
)


def test_falcon_layouts() -> None:
    grouped = build_config(
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": False}
    )
    assert (grouped.num_kv_heads, grouped.parallel_ffn, grouped.has_ffn_norm) == (2, True, True)
    sequential = build_config(FALCON | {"parallel_attn": False, "multi_query": False})
    assert (sequential.num_kv_heads, sequential.parallel_ffn) == (4, False)
    # Configs of falcon-7b carry a number of KV heads that is not used.
    assert build_config(FALCON | {"num_kv_heads": 4}).num_kv_heads == 1


def test_gemma3_in_both_spellings_and_within_a_model_with_pictures() -> None:
    old = GEMMA3 | {
        "rope_theta": 3e5,
        "rope_local_base_freq": 2e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
        "sliding_window": 9,
    }
    config = build_config(old)
    assert config.ropes == (RopeConfig(3e5, "linear", 8.0), RopeConfig(2e3))
    assert config.layer_ropes == (1, 1, 0, 1, 1, 0, 1)
    assert config.windows == (9, 9, 0, 9, 9, 0, 9)
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (256, 4, (1,))
    assert config.attention_scale == 256**-0.5 and config.embedding_scale == 8.0
    new = {key: value for key, value in old.items() if "rope" not in key} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        }
    }
    assert build_config(new) == config
    inner = {key: value for key, value in new.items() if key != "architectures"}
    wrapper = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": inner,
        "vision_config": {},
        "eos_token_id": [1, 3],
    }
    assert replace(build_config(wrapper), eos_token_ids=(1,)) == config
    assert build_config(wrapper).eos_token_ids == (1, 3)


def test_windows_are_off_where_config_json_says_so() -> None:
    off = build_config(QWEN3 | {"sliding_window": 7, "use_sliding_window": False})
    assert off.windows == () and off.qk_norm == "head" and off.head_dim == 128
    uses = {"sliding_window": 7, "use_sliding_window": True}
    assert build_config(QWEN3 | uses | {"max_window_layers": 1}).windows == (0, 7)
    assert build_config(QWEN3 | uses | {"max_window_layers": 2}).windows == ()
    assert build_config(PHI3).windows == () and build_config(PHI3).fused_gate_up
    assert build_config(PHI3 | {"sliding_window": 7}).windows == (7, 7)
    assert build_config(BAMBOO | {"sliding_window": None}).windows == ()
    assert build_config(BAMBOO).windows == (4096, 4096)


def test_layers_without_rope() -> None:
    four = SMOLLM3 | {"num_hidden_layers": 5, "num_key_value_heads": 2}
    assert build_config(four).layer_ropes == (0, 0, 0, -1, 0)
    assert build_config(four | {"no_rope_layers": [1, 0, 1, 1, 0]}).layer_ropes == (0, -1, 0, 0, -1)


def test_longrope_takes_long_factors_for_long_contexts() -> None:
    rope = build_config(PHI3 | {"rope_scaling": LONGROPE, "max_position_embeddings": 256}).rope
    assert rope is not None and rope.kind == "longrope"
    assert rope.table_scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
    assert rope.length_that_counts(64) == 0
    assert rope.length_that_counts(65) == rope.length_that_counts(256) > 0
    np.testing.assert_allclose(rope.inv_freq(16, 64), 2 * rope.inv_freq(16, 65))


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (YARN, 2048),
        (YARN | {"factor": 16.0}, 8192),
        (YARN | {"factor": 0.5}, 1500),
        ({"rope_type": "dynamic", "factor": 2.5}, 3750),
        ({"rope_type": "dynamic", "factor": 1e11}, 1 << 26),
        ({"rope_type": "linear", "factor": 2.0}, 1500),
        (LLAMA3, 1500),
    ],
)
def test_ropes_that_stretch_the_context(rope: dict[str, Any], longest: int) -> None:
    config = build_config(LLAMA | {"max_position_embeddings": 1500, "rope_scaling": rope})
    assert config.max_positions == longest
