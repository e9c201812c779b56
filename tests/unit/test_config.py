"""config.json: what is read, what is refused, and that each refusal is one line naming its key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config.build import build_config, read_config
from model.config.model_config import ActivationFn, RopeConfig
from model.errors import ConfigError, HotcoldError
from numba_kernels.checks import ACTIVATION_CODES

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
    "activation": "gelu",
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
NEMOTRON = LLAMA | {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron"}
MINICPM = LLAMA | {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
BAMBOO = LLAMA | {
    "architectures": ["BambooForCausalLM"],
    "model_type": "bamboo",
    "num_key_value_heads": 4,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
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


def test_what_is_sparse_and_how() -> None:
    assert build_config(BAMBOO).activation_fn == "drelu"
    minicpm = build_config(MINICPM | {"hidden_act": "fatrelu", "hidden_act_param": 0.01})
    assert (minicpm.activation_fn, minicpm.activation_threshold) == ("fatrelu", 0.01)
    nemotron = build_config(NEMOTRON | {"hidden_act": "relu2"})
    assert nemotron.is_sparse and not nemotron.has_gate and nemotron.norm_offset == 1
    assert not build_config(LLAMA | {"hidden_act": "silu"}).is_sparse
    rope = nemotron.rope
    assert rope is not None and rope.rotary_dim(nemotron.head_dim) == 8


def test_layers_without_rope() -> None:
    four = SMOLLM3 | {"num_hidden_layers": 5, "num_key_value_heads": 2}
    assert build_config(four).layer_ropes == (0, 0, 0, -1, 0)
    assert build_config(four | {"no_rope_layers": [1, 0, 1, 1, 0]}).layer_ropes == (0, -1, 0, 0, -1)


def test_longrope_takes_long_factors_for_long_contexts() -> None:
    rope = build_config(PHI3 | {"rope_scaling": LONGROPE, "max_position_embeddings": 256}).rope
    assert rope is not None and rope.kind == "longrope"
    assert rope.table_scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
    assert not rope.is_long(64) and rope.is_long(65)
    np.testing.assert_allclose(rope.inv_freq(16, False), 2 * rope.inv_freq(16, True))


def test_names_of_functions_are_those_of_kernels() -> None:
    assert set(get_args(ActivationFn)) == set(ACTIVATION_CODES)


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
        {"rope_theta": 300.0, "rope_scaling": YARN},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"truncate": False, "beta_fast": 3.0}},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 0.7, "factor": 0.5}},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"attention_factor": 1.3}},
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
        expected, scale = ROPE_INIT_FUNCTIONS[kind](theirs)
        np.testing.assert_array_equal(found, expected.numpy())
        assert config.rope.table_scale == pytest.approx(scale, rel=1e-12)


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
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
        (PHI3, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
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
        (FALCON, {"activation": None}, "add gelu, or relu"),
        (
            QWEN3,
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "7"},
            "sliding_window",
        ),
        (QWEN3, {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN3, {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window"),
        (GEMMA3, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        (GEMMA3, {"rope_parameters": {"full_attention": 3}}, "full_attention"),
        (GEMMA3, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA, {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
        (LLAMA, {"scale_emb": 12}, "scale_emb"),
        (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (PHI3, {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 7}}, "short_factor"),
        (PHI3, {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, "long_factor"),
        (PHI3, {"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        (LLAMA, {"rope_scaling": LONGROPE}, "longrope"),
        (NEMOTRON, {"partial_rotary_factor": 0.2}, "head_dim"),
        (NEMOTRON, {"partial_rotary_factor": 2}, "partial_rotary_factor"),
        (SMOLLM3, {"no_rope_layers": [1, 2], "num_key_value_heads": 2}, "no_rope_layers"),
        (MINICPM, {"scale_depth": "x"}, "scale_depth"),
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
        "sliding_window_pattern",
        "use_sliding_window",
        "no_rope_layers",
        "partial_rotary_factor",
        "text_config",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "hidden_act_param",
        "scale_emb",
        "scale_depth",
        "dim_model_base",
    }
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([LLAMA, OPT, FALCON, GEMMA3, PHI3, QWEN3, SMOLLM3, NEMOTRON, MINICPM, BAMBOO]),
    st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
)
def test_random_values_never_escape(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        build_config(base | changes)
    except HotcoldError as error:
        assert "\n" not in str(error)
