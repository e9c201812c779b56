"""config.json: what is refused, each in one line that names its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.model.config.build import build_config, read_config
from hotcold.model.errors import ConfigError, HotcoldError
from tests.unit.family_configs import (
    BAMBOO,
    FALCON,
    GEMMA3,
    LLAMA,
    LLAMA3,
    LONGROPE,
    MINICPM,
    NEMOTRON,
    OPT,
    PHI3,
    QWEN3,
    SMOLLM3,
)

pytestmark = pytest.mark.sweep(keep=40)


def refused(config: dict[str, Any]) -> str:
    """Return the one line that refuses `config`."""
    with pytest.raises(ConfigError) as caught:
        build_config(config, source="dir/config.json")
    text = str(caught.value)
    assert "\n" not in text and "dir/config.json" in text
    return text


@pytest.mark.parametrize("value", [None, 0, 1 << 60, 2.5, True, [1]])
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_bad_sizes(key: str, value: Any) -> None:
    assert key in refused(LLAMA | {key: value})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "ffn_dim", "vocab_size"])
def test_missing_sizes(key: str) -> None:
    assert f"{key} is missing" in refused({name: OPT[name] for name in OPT if name != key})


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
        (PHI3, {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, "long_factor"),
        (LLAMA, {"rope_scaling": LONGROPE}, "longrope"),
        (NEMOTRON, {"partial_rotary_factor": 0.2}, "head_dim"),
        (SMOLLM3, {"no_rope_layers": [1, 2], "num_key_value_heads": 2}, "no_rope_layers"),
        (BAMBOO, {"hidden_act": "silu"}, "hidden_act"),
    ],
)
def test_contradictory_and_unsupported(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    assert named in refused(base | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None, "model_type": "bloom"},
        {"architectures": [{}], "model_type": ["llama"]},
    ],
)
def test_unknown_architecture_is_named(changes: dict[str, Any]) -> None:
    text = refused(LLAMA | changes)
    assert "each with ForCausalLM: Llama, SparseLlama, OPT, Falcon" in text
    if isinstance(changes.get("model_type"), str):
        assert changes["model_type"] in text


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
    " final_logit_softcapping hidden_act_param scale_emb scale_depth dim_model_base"
)
KEYS = sorted({*LLAMA, *OPT, *FALCON, *OTHER_KEYS.split()})


@settings(max_examples=100)
@given(
    st.sampled_from([LLAMA, OPT, FALCON, GEMMA3, PHI3, QWEN3, SMOLLM3, NEMOTRON, MINICPM, BAMBOO]),
    st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
)
def test_random_values_never_escape(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        build_config(base | changes)
    except HotcoldError as error:
        assert "\n" not in str(error)
