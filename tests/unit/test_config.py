"""config.json: what is read, ropes beside transformers' own, what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.actors.attention.arrays import rope_tables
from hotcold.actors.protocol.messages import CacheSpec
from hotcold.model.config.build import build_config, read_config
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.errors import ConfigError, HotcoldError
from tests.unit.family_configs import (
    BAMBOO,
    FALCON,
    GEMMA3,
    GEMMA4,
    LLAMA,
    LLAMA3,
    LONGROPE,
    MINICPM,
    NEMOTRON,
    OPT,
    PHI3,
    QWEN3,
    SMOLLM3,
    YARN,
)


def test_keys_of_falcon_that_say_nothing() -> None:
    """Configs of falcon-7b carry a number of KV heads; a new decoder is parallel in any case."""
    assert build_config(FALCON | {"num_kv_heads": 4}).num_kv_heads == 1
    grouped = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
    assert build_config(grouped | {"parallel_attn": False}) == build_config(grouped)


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


def test_text_models_beside_a_vision_part() -> None:
    """In `text_config`, or in the same object, as Qwen2.5-VL was published."""
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = text | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {},
        "rope_scaling": rope,
        "use_sliding_window": False,
        "sliding_window": 32768,
    }
    config = build_config(flat)
    assert config.family == "qwen2" and config.attention_bias and config.ropes[0].kind == "default"
    inner = text | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    assert build_config({"model_type": "qwen2_5_vl", "text_config": inner}) == config
    own = {"model_type": "mistral", "num_key_value_heads": 4}
    mistral = {"model_type": "mistral3", "text_config": text | own}
    assert build_config(mistral | {"tie_word_embeddings": True}).tied_embeddings
    assert not build_config(mistral).tied_embeddings


def test_gemma4s_layers_have_heads_of_their_own() -> None:
    own = {"num_hidden_layers": 12, "sliding_window": 9, "hidden_size_per_layer_input": None}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    config = build_config(GEMMA4 | own | keys)
    assert config.windows == ((9,) * 5 + (0,)) * 2 and config.key_value_layers == (5, 11)
    heads = [(each.num_kv_heads, each.head_dim) for each in config.layer_heads]
    assert heads == ([(4, 256)] * 5 + [(1, 32)]) * 2
    assert config.ropes == (RopeConfig(1e6, "proportional", share=0.25), RopeConfig(1e4))
    # As transformers writes it.
    each = {"head_dim": 32, "num_key_value_heads": 1}
    of_layers = {"per_layer_config": {"5": each, "11": each}, "attention_k_eq_v": True}
    assert build_config(GEMMA4 | own | of_layers) == config
    # The 12B, whose class has another name.
    inner = GEMMA4 | own | keys | {"model_type": "gemma4_unified_text", "architectures": None}
    wrapper = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "text_config": inner,
    }
    assert replace(build_config(wrapper), family=config.family) == config


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


LONG, TRAINED = 131_072, 4096
LONG_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": TRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 8.0},  # as it was spelled before
    "llama3": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": TRAINED},
    "yarn": LONG_YARN,
    "yarn-not-truncated": LONG_YARN | {"truncate": False, "beta_fast": 3.0},
    "yarn-mscales": LONG_YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-attention-factor": LONG_YARN | {"attention_factor": 1.3},
    "dynamic": {"rope_type": "dynamic", "factor": LONG / TRAINED},
    "longrope": LONGROPE
    | {
        "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.1],
        "long_factor": [1.1, 1.3, 2.0, 4.0, 9.0, 21.0, 40.0, 60.0],
        "original_max_position_embeddings": TRAINED,
    },
}


def config_json(kind: str) -> dict[str, Any]:
    """config.json of a tiny model whose context was extended to LONG by that rope."""
    trained = TRAINED if kind == "dynamic" else LONG
    family = PHI3 if kind == "longrope" else LLAMA
    config = family | {"max_position_embeddings": trained}
    if "type" in ROPES[kind]:
        return config | {"rope_theta": 10_000.0, "rope_scaling": ROPES[kind]}
    return config | {"rope_parameters": ROPES[kind] | {"rope_theta": 10_000.0}}


def table_of(config: ModelConfig, length: int) -> np.ndarray:
    """(P, 2, half) of a system with such a context."""
    (table,) = rope_tables(config, CacheSpec(1, length, "float32"))
    return table


def expected_table(kind: str, length: int) -> np.ndarray:
    """What transformers gives a sequence of so many positions."""
    from transformers import LlamaConfig, Phi3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    values = {k: v for k, v in config_json(kind).items() if k != "architectures"}
    if kind == "longrope":
        rotary = Phi3RotaryEmbedding(Phi3Config(**(values | {"pad_token_id": None})))
    else:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**values))
    parts = rotary(torch.empty(1), torch.arange(length)[None])
    return np.stack([part[0, :, : part.shape[2] // 2].numpy() for part in parts], axis=1)


@pytest.mark.parametrize(
    ("kind", "length"),
    [*((kind, LONG) for kind in ROPES), ("dynamic", TRAINED + 1), ("longrope", TRAINED)],
)
def test_tables_equal_transformers(kind: str, length: int) -> None:
    """To the rounding of a cosine in float32: the angles are equal to the bit."""
    config = build_config(config_json(kind))
    assert config.max_positions == LONG
    found, expected = table_of(config, length), expected_table(kind, length)
    assert found.dtype == np.float32 and found.shape == expected.shape == (length, 2, 8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-22 * expected.max())


def refused(config: dict[str, Any]) -> str:
    """Return the one line that refuses `config`."""
    with pytest.raises(ConfigError) as caught:
        build_config(config, source="dir/config.json")
    text = str(caught.value)
    assert "\n" not in text and "dir/config.json" in text
    return text


def test_bad_and_missing_sizes() -> None:
    for key in ("num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        for value in (None, 0, 1 << 60, 2.5, True, [1]):
            assert key in refused(LLAMA | {key: value})
    for key in ("hidden_size", "num_hidden_layers", "ffn_dim", "vocab_size"):
        assert f"{key} is missing" in refused({name: OPT[name] for name in OPT if name != key})


NO_CLASS = LLAMA | {"architectures": None}


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"num_attention_heads": 5}, "hidden_size"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA, {"hidden_act": "fatrelu"}, "fatrelu"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (LLAMA, {"eos_token_id": 100}, "eos_token_id"),
        (LLAMA, {"dtype": "float64"}, "float64"),
        (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
        (LLAMA, {"rope_theta": 0}, "rope_theta"),
        (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "factor"),
        (LLAMA, {"rope_scaling": {"type": "abf", "factor": 2.0}}, "abf"),
        (LLAMA, {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim"),
        (PHI3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "type": "llama3"}}, "rope_type"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA, {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (LLAMA, {"layer_types": [[]]}, "layer_types"),
        (
            LLAMA,
            {"architectures": None, "model_type": "lfm2", "layer_types": [[], []]},
            "layer_types is [[], []]; give conv or full_attention for each layer",
        ),
        (OPT, {"head_dim": 8}, "head_dim"),
        (OPT, {"activation_function": "tanh"}, "tanh"),
        (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads"),
        (FALCON, {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        (FALCON, {"activation": None}, "add gelu, or relu"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window"),
        (GEMMA3, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        (GEMMA3, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (GEMMA4, {"enable_moe_block": True, "num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        (GEMMA4, {"enable_moe_block": True, "hidden_size_per_layer_input": 0}, "num_experts"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4, {"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        (GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (GEMMA4, {"per_layer_config": {"9": {}}}, "per_layer_config"),
        (GEMMA4, {"per_layer_config": {"0": {"window": 3}}}, "per_layer_config"),
        (
            GEMMA4,
            {"num_kv_shared_layers": 1, "per_layer_config": {"6": {"head_dim": 8}}},
            "head_dim",
        ),
        (GEMMA4, {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input"),
        (GEMMA3, {"rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
        (PHI3, {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, "long_factor"),
        (LLAMA, {"rope_scaling": LONGROPE}, "longrope"),
        (NEMOTRON, {"partial_rotary_factor": 0.2}, "head_dim"),
        (SMOLLM3, {"no_rope_layers": [1, 2], "num_key_value_heads": 2}, "no_rope_layers"),
        (BAMBOO, {"hidden_act": "silu"}, "hidden_act"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "lists the families"),
        (LLAMA, {"architectures": [{}], "model_type": ["llama"]}, "lists the families"),
        (LLAMA, {"architectures": ["LamaForCausalLM"]}, "did you mean LlamaForCausalLM?"),
        (NO_CLASS, {"model_type": "bloom"}, "'bloom', which is not supported; README.md lists"),
        (NO_CLASS, {"model_type": "deepseek_v4"}, "DeepSeek-V4 chooses positions by an indexer"),
        (NO_CLASS, {"model_type": "falcon_h1"}, "use Granite 4 or Nemotron 3 Nano instead"),
        (
            {"model_type": "mistral3"},
            {"text_config": NO_CLASS | {"model_type": "falcon_h1"}},
            "use Granite 4 or Nemotron 3 Nano instead",
        ),
    ],
)
def test_contradictory_and_unsupported(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    assert named in refused(base | changes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
    ],
)
def test_damaged_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """Programs differ in which of the two counts."""
    file = tmp_path / "config.json"
    for more in ('"num_hidden_layers": 2', '"rope_scaling": {"type": "linear", "type": "linear"}'):
        file.write_text(json.dumps(LLAMA)[:-1] + f", {more}}}")
        with pytest.raises(ConfigError, match=r"config\.json: key '\w+' is given twice"):
            read_config(tmp_path)


def test_the_model_is_named_by_its_directory(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--repo-7b" / "snapshots" / "0123abc"
    for directory, name in ((tmp_path / "mine", "mine"), (cached, "org/repo-7b")):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(LLAMA))
        assert read_config(directory).name == name


def test_missing_file_and_directory_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
OTHER_KEYS = (
    "rope_scaling rope_parameters rope_theta head_dim eos_token_id num_key_value_heads num_kv_heads"
    " dtype layer_types activation sliding_window sliding_window_pattern use_sliding_window"
    " no_rope_layers partial_rotary_factor text_config query_pre_attn_scalar"
    " num_kv_shared_layers per_layer_config attention_k_eq_v hidden_size_per_layer_input"
    " final_logit_softcapping hidden_act_param scale_emb scale_depth dim_model_base"
)
KEYS = sorted({*LLAMA, *OPT, *FALCON, *OTHER_KEYS.split()})


@settings(max_examples=100)
@given(
    st.sampled_from(
        [LLAMA, OPT, FALCON, GEMMA3, GEMMA4, PHI3, QWEN3, SMOLLM3, NEMOTRON, MINICPM, BAMBOO]
    ),
    st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
)
def test_random_values_never_escape(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        build_config(base | changes)
    except HotcoldError as error:
        assert "\n" not in str(error)
