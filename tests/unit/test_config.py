"""config.json: what is read, what is refused, and that each refusal is one line naming its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config.build import build_config, read_config
from model.config.model_config import RopeConfig
from model.errors import ConfigError, HotcoldError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "hidden_act": "relu",
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "vocab_size": 100,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refused(config: dict[str, Any]) -> str:
    """Return the one line that refuses `config`."""
    with pytest.raises(ConfigError) as caught:
        build_config(config, source="dir/config.json")
    text = str(caught.value)
    assert "\n" not in text and "dir/config.json" in text
    return text


def test_defaults_of_each_family() -> None:
    llama = build_config(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.tied_embeddings) == (4, 16, False)
    assert (llama.has_gate, llama.norm_kind, llama.rope) == (True, "rmsnorm", RopeConfig(10000.0))
    assert (llama.bos_token_id, llama.eos_token_ids, llama.dtype) == (1, (2,), "float32")
    opt = build_config(OPT)
    assert (opt.activation_fn, opt.position_offset, opt.rope) == ("relu", 2, None)
    assert (opt.has_gate, opt.ffn_bias, opt.tied_embeddings, opt.post_norm) == (
        False,
        True,
        True,
        False,
    )
    falcon = build_config(FALCON)
    assert (falcon.num_kv_heads, falcon.ffn_size, falcon.activation_fn) == (1, 256, "gelu")
    assert (falcon.parallel_ffn, falcon.has_ffn_norm) == (True, False)


def test_falcon_layouts() -> None:
    grouped = build_config(
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": False}
    )
    assert (grouped.num_kv_heads, grouped.parallel_ffn, grouped.has_ffn_norm) == (2, True, True)
    sequential = build_config(FALCON | {"parallel_attn": False, "multi_query": False})
    assert (sequential.num_kv_heads, sequential.parallel_ffn) == (4, False)
    # Configs of falcon-7b carry a number of KV heads that is not used.
    assert build_config(FALCON | {"num_kv_heads": 4}).num_kv_heads == 1


def test_several_eos_ids_and_dtype_spellings() -> None:
    config = build_config(LLAMA | {"eos_token_id": [7, 9], "torch_dtype": "float16"})
    assert (config.eos_token_ids, config.dtype) == ((7, 9), "float16")
    assert build_config(LLAMA | {"dtype": "bfloat16"}).dtype == "bfloat16"
    assert build_config(LLAMA | {"bos_token_id": None}).bos_token_id is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
        {"rope_theta": 123.0, "rope_scaling": None},
    ],
)
def test_inv_freq_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | rope))
    config = read_config(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert config.rope is not None
    found = config.rope.inv_freq(config.head_dim)
    assert found.dtype == np.float32 and found.shape == (8,)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        expected = 1 / (theirs.rope_parameters["rope_theta"] ** (np.arange(0, 16, 2) / 16))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, ROPE_INIT_FUNCTIONS[kind](theirs)[0].numpy())


@pytest.mark.parametrize("value", [None, "x", 0, -1, 1 << 60, 10**400, 2.5, 64.0, True, [1], {}])
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
        (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"hidden_act": "fatrelu"}, "fatrelu"),
        (LLAMA, {"hidden_act": "quick_gelu"}, "quick_gelu"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        (LLAMA, {"attention_bias": 1}, "attention_bias"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (LLAMA, {"eos_token_id": 100}, "eos_token_id"),
        (LLAMA, {"eos_token_id": [1, "2"]}, "eos_token_id"),
        (LLAMA, {"bos_token_id": -1}, "bos_token_id"),
        (LLAMA, {"dtype": "float64"}, "float64"),
        (LLAMA, {"torch_dtype": 16}, "torch_dtype"),
        (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
        (LLAMA, {"rope_theta": 0}, "rope_theta"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "type": "llama3"}}, "rope_type"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA, {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA, {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling"),
        (LLAMA, {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (LLAMA, {"layer_types": [[]]}, "layer_types"),
        (OPT, {"head_dim": 8}, "head_dim"),
        (OPT, {"activation_function": "tanh"}, "tanh"),
        (OPT, {"word_embed_proj_dim": -2}, "word_embed_proj_dim"),
        (FALCON, {"alibi": True}, "alibi"),
        (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads"),
        (FALCON, {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        (FALCON, {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        (FALCON, {"activation": "gelu", "hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_contradictory_and_unsupported(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    assert named in refused(base | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["OPTForCausalLM"]},
        {"architectures": None, "model_type": "bloom"},
        {"architectures": [], "model_type": None},
        {"architectures": [{}], "model_type": ["llama"]},
    ],
)
def test_unknown_architecture_is_named(changes: dict[str, Any]) -> None:
    text = refused(LLAMA | changes)
    assert "LlamaForCausalLM, OPTForCausalLM, FalconForCausalLM" in text
    if isinstance(changes.get("model_type"), str):
        assert changes["model_type"] in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe\x00",
        b'{"a": 1, "a": 2}',
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
KEYS = sorted(
    {
        *LLAMA,
        *OPT,
        *FALCON,
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "head_dim",
        "eos_token_id",
    }
    | {
        "num_key_value_heads",
        "num_kv_heads",
        "dtype",
        "layer_types",
        "activation",
        "sliding_window",
    }
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([LLAMA, OPT, FALCON]),
    st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
)
def test_random_values_never_escape(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        build_config(base | changes)
    except HotcoldError as error:
        assert "\n" not in str(error)
