"""Every architecture of GGUF files that is read, against transformers' model of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotcold.model.config.build import read_config
from hotcold.model.config.families import GGUF_ARCHITECTURES
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import CheckpointError, ConfigError
from tests import tiny_models
from tests.gguf_files import LlamaFile, left_out, small_llama
from tests.reference import reference_logits, relative_difference
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MIXTURES, VARIANTS, VOCAB_SIZE, Variant, make_tiny
from tests.unit.test_mixtures import FILES

IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60)
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
WINDOWS_OF_FIVE = {
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, True, True, False, True],
}
GEMMA4_KEYS = {
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 24,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}
# The rope of layers without a window: three of twelve pairs are rotated.
GEMMA4_ROPE = {"rope_freqs.weight": np.array([1.0] * 3 + [1e30] * 9, np.float32)}
# Files of the E models also have keys and values that no layer reads; Ollama's what pictures take.
UNREAD = ("v.blk.0.attn_q", "mm.a", *(f"blk.{i}.attn_{name}" for i in (3, 4, 5) for name in "kv"))
# Of a layer's experts, with the converter's names.
GEMMA4_EXPERTS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
# In files of PowerInfer's own; transposed.
POWERINFER = {"mlp.dense_4h_to_h.weight": "ffn_down_t.weight"}
EXPERT_KEYS = {
    "expert_count": 7,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
}
# The converter writes these for models without recurrent layers, too.
RECURRENT_KEYS = {
    "expert_shared_feed_forward_length": 64,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 256,
    "ssm.group_count": 1,
    "ssm.inner_size": 512,
    "ssm.time_step_rank": 8,
}


@dataclass(frozen=True)
class Case:
    """A tiny model, and how its file is written."""

    model: str | Variant
    keys: dict[str, Any] = field(default_factory=dict)  # the architecture's name left out
    arch: str = ""  # where it is not the case's name
    pairs_rows: bool = False
    halves: int = 0
    kinds: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)  # in place of config.json's
    names: dict[str, str] = field(default_factory=dict)  # of a layer's tensors, the file's
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def variant(self) -> Variant:
        return (VARIANTS | MIXTURES)[self.model] if isinstance(self.model, str) else self.model


def relative(kind: str, **changes: Any) -> Variant:
    sizes = {"hidden_act": "silu", "num_key_value_heads": 2}
    return Variant(tiny_models._relative, kind, **(sizes | changes))


def of_llama(keys: dict[str, Any], **changes: Any) -> Case:
    """A Llama as its files are: with SiLU, which no key says."""
    model = Variant(tiny_models._llama, hidden_act="silu", num_key_value_heads=2, **changes)
    return Case(model, keys, "llama", pairs_rows=True)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_theta": 500.0, **values}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def of_longrope(keys: dict[str, Any], **factor: float) -> Case:
    """Cosines and sines are multiplied with attn_factor; without it, as the context says."""
    short, long = ([first + i / 8 for i in range(6)] for first in (1.0, 2.0))
    own = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **factor}
    extra = {
        f"rope_factors_{name}.weight": np.array(factors, np.float32)
        for name, factors in (("short", short), ("long", long))
    }
    model = relative(
        "Phi3",
        sliding_window=5,
        original_max_position_embeddings=8,
        rope_parameters=rope(**own, original_max_position_embeddings=8),
    )
    keys = keys | {
        "attention.sliding_window": 5,
        "rope.scaling.original_context_length": 8,
    }
    return Case(model, keys, "phi3", extra=extra)


CASES: dict[str, Case] = {
    "llama": of_llama({}),
    "llama-tied": of_llama({}, tie_word_embeddings=True),
    "llama-biases": of_llama({}, attention_bias=True, mlp_bias=True),
    "llama-f16": replace(of_llama({}, head_dim=32), kinds={"attn": "F16"}),
    "llama-linear": of_llama(
        {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
        rope_parameters=rope(rope_type="linear", factor=3.0),
    ),
    "llama-scale-linear": of_llama(
        {"rope.scale_linear": 3.0}, rope_parameters=rope(rope_type="linear", factor=3.0)
    ),
    "llama-yarn-factor": of_llama(
        YARN | {"rope.scaling.attn_factor": 1.4},
        rope_parameters=rope(**_YARN, attention_factor=(0.1 * math.log(4) + 1) * 1.4),
    ),
    "llama-yarn-betas": of_llama(
        YARN | {"rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.yarn_beta_slow": 0.5},
        head_dim=32,
        rope_parameters=rope(**_YARN, beta_fast=2.0, beta_slow=0.5),
    ),
    "llama-yarn-plain": of_llama(
        YARN
        | {
            "rope.scaling.finetuned": True,
            "rope.scaling.attn_factor": 1.0,
            "rope.scaling.yarn_ext_factor": 1.0,
            "rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1,
            "rope.scaling.yarn_log_multiplier": 0.0,
            "rope.freq_base_swa": 500.0,
        },
        rope_parameters=rope(**_YARN),
    ),
    # llama.cpp has no architecture of Mistral's, and leaves the window out.
    "llama-window": Case(
        relative("Mistral", sliding_window=4), {"attention.sliding_window": 4}, "llama", True
    ),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "gemma2": Case(
        Variant(VARIANTS["gemma2"], query_pre_attn_scalar=20),
        {
            "attention.sliding_window": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Case(
        Variant(VARIANTS["gemma3"], query_pre_attn_scalar=20), {"attention.sliding_window": 7}
    ),
    "gemma4": Case(
        Variant(VARIANTS["gemma4-e"], tie_word_embeddings=True),
        GEMMA4_KEYS
        | {
            "embedding_length_per_layer_input": 32,
            "attention.shared_kv_layers": 3,
        },
        sizes={"head_dim": 24, "intermediate_size": [88] * 3 + [176] * 3},
        extra=GEMMA4_ROPE | {f"{name}.weight": np.ones((4, 4), np.float32) for name in UNREAD},
    ),
    # The 12B and 31B: layers without a window have no v, and another number of KV heads.
    "gemma4-31b": Case(
        Variant(VARIANTS["gemma4"], tie_word_embeddings=True),
        GEMMA4_KEYS,
        "gemma4",
        sizes={"head_dim": 24, "num_key_value_heads": [2, 2, 1] * 2},
        extra=GEMMA4_ROPE,
    ),
    # The 26B-A4B: an FFN and experts in each layer.
    "gemma4-26b-a4b": Case(
        Variant(MIXTURES["gemma4-a4b"], tie_word_embeddings=True),
        GEMMA4_KEYS | EXPERT_KEYS,
        "gemma4",
        sizes={"head_dim": 24, "num_key_value_heads": [2, 2, 1] * 2},
        names=GEMMA4_EXPERTS,
        extra=GEMMA4_ROPE,
    ),
    "granitehybrid": Case(
        "granite4-h",
        {
            "residual_scale": 0.4,
            "expert_shared_feed_forward_length": 76,
            "attention.scale": 0.3,
            "attention.head_count_kv": [0, 2, 0, 0],
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 12,
            "ssm.group_count": 2,
            "ssm.inner_size": 96,
            "ssm.time_step_rank": 8,
        },
        pairs_rows=True,
    ),
    "lfm2": Case(
        "lfm2",
        {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": [0, 0, 2, 0],
            "shortconv.l_cache": 4,
        },
    ),
    "qwen35": Case(
        "qwen3.5",
        {
            "attention.recurrent_layers": [True] * 3 + [False],
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 48,
        },
    ),
    "phi3": Case("phi3"),
    "phi3-longrope": of_longrope({}),
    "phi3-longrope-factor": of_longrope({"rope.scaling.attn_factor": 1.25}, attention_factor=1.25),
    "olmo2": Case("olmo2"),
    "olmo2-windows": Case(
        "olmo3",
        WINDOWS_OF_FIVE | YARN | {"rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1},
        "olmo2",
    ),
    "granite": Case(
        "granite",
        {
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.2,
            "logit_scale": 2.5,
            "rope.scaling.finetuned": True,
            **RECURRENT_KEYS,
        },
        pairs_rows=True,
    ),
    "mistral3": Case(
        "ministral3",
        YARN | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.4},
        pairs_rows=True,
    ),
    "mistral3-plain": Case(relative("Mistral", sliding_window=None), {}, "mistral3", True),
    "qwen2vl": Case("qwen2.5-vl", {"rope.dimension_sections": [2, 2, 2, 0]}),
    "qwen3vl": Case("qwen3-vl", {"rope.dimension_sections": [4, 3, 3, 0], "n_deepstack_layers": 3}),
    "seed_oss": Case("seed-oss"),
    "hunyuan-dense": Case("hunyuan"),
    "exaone4": Case(Variant(VARIANTS["exaone4-windows"], hidden_act="silu"), WINDOWS_OF_FIVE),
    "exaone4-full": Case(Variant(VARIANTS["exaone4"], hidden_act="silu"), {}, "exaone4"),
    "glm4": Case("glm4", {"rope.dimension_count": 10}),
    "glm4-halves": Case(
        "glm4",
        {"rope.dimension_count": 10, "rope.dimension_sections": [2, 2, 1, 0]},
        "glm4",
        halves=10,
    ),
    "ernie4_5": Case(Variant(VARIANTS["ernie4.5"], use_bias=False)),
    "smollm3": Case("smollm3", pairs_rows=True),
    "arcee": Case("arcee", YARN, pairs_rows=True),
    "command-r": Case("cohere", LAYER_NORM | {"logit_scale": 0.0625}),
    "cohere2": Case("cohere2", LAYER_NORM | {"attention.sliding_window": 9, "logit_scale": 0.25}),
    "starcoder2": Case(Variant(VARIANTS["starcoder2"], sliding_window=None), LAYER_NORM),
    "nemotron": Case("nemotron", LAYER_NORM | {"rope.dimension_count": 10}),
    "falcon": Case("falcon-gelu", LAYER_NORM),
    "falcon-relu": Case(
        "falcon-grouped",
        LAYER_NORM,
        "falcon",
        names=POWERINFER,
    ),
}


def written(case: Case, name: str, folder: Path, is_fused: bool = False) -> Path:
    """Make the case's model in `folder`, and m.gguf of it as llama.cpp's converter does."""
    with mock.patch.dict(VARIANTS, {"own": case.variant}):
        make_tiny("own", folder, dtype="float16" if case.kinds else "float32")
    return converted(case, name, folder, is_fused)


def converted(case: Case, name: str, folder: Path, is_fused: bool = False) -> Path:
    """Write m.gguf of the model that is in `folder`; is_fused: as with --fuse-qkv."""
    config, arch = read_config(folder), case.arch or name
    values = json.loads((folder / "config.json").read_text())
    sizes = {
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.num_kv_heads,
    }
    keys = {"rope.freq_base": config.ropes[0].theta} if config.ropes else {}
    tensors, extra = {}, dict(case.extra)
    for full_name, rows in load_file(folder / "model.safetensors").items():
        own, values_of = full_name.replace("language_model.", ""), rows.astype(np.float32)
        layer, _, role = re.sub(r"^\w+\.(layers|h)\.", "", own).partition(".")
        if "query_key_value" in own:
            values_of = by_kind(config, values_of)
        if theirs := case.names.get(role):
            extra[f"blk.{layer}.{theirs}"] = values_of.T if "_t." in theirs else values_of
        elif "visual." not in own and not (config.tied_embeddings and "lm_head" in own):
            tensors[own] = values_of
    file = LlamaFile(
        values.get("text_config", values) | sizes | case.sizes,
        tensors,
        case.kinds,
        {key if "general." in key else f"{arch}.{key}": v for key, v in (keys | case.keys).items()},
        {key: np.ascontiguousarray(v) for key, v in extra.items()},
        arch,
        pairs_rows=case.pairs_rows,
        halves=case.halves,
        adds_one=config.norm_offset == 1,
    )
    if is_fused:
        fuse_qkv(file)
    file.write(folder / "m.gguf")
    return folder / "m.gguf"


def by_kind(config: ModelConfig, rows: np.ndarray) -> np.ndarray:
    """Falcon's rows, which are by key head, as those of q, of k and of v."""
    heads = rows.reshape(config.num_kv_heads, -1, config.head_dim, rows.shape[1])
    parts = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    return np.concatenate([part.reshape(-1, rows.shape[1]) for part in parts])


def fuse_qkv(file: LlamaFile) -> None:
    """q's, k's and v's rows in one tensor, where a layer has all."""
    for name in [name for name in file.tensors if "q_proj." in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in file.tensors for part in parts):
            rows = [file.in_file(part, file.tensors.pop(part)) for part in parts]
            layer, suffix = name.split(".")[2], name.rpartition(".")[2]
            file.extra[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(rows)


# Pairs of rows, biases, layers without k and v, gates and recurrent layers.
FUSED = ("llama", "seed_oss", "gemma4", "qwen35")


@pytest.mark.parametrize(
    ("name", "is_fused"), [*((name, False) for name in CASES), *((name, True) for name in FUSED)]
)
def test_logits_are_transformers(name: str, is_fused: bool, tmp_path: Path) -> None:
    case = CASES[name]
    path = written(case, name, tmp_path, is_fused)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    assert relative_difference(reference_logits(path, IDS), expected) < 2e-5
    assert not left_out(path)


def test_every_architecture_is_compared() -> None:
    """Bamboo is PowerInfer's alone (test_powerinfer_import.py); mixtures: test_mixtures.py."""
    mixtures = {arch for _, arch, _, _ in FILES.values()}
    archs = {case.arch or name for name, case in CASES.items()}
    assert {*archs, "bamboo", "minicpm", *mixtures} == GGUF_ARCHITECTURES.keys()


def minicpm(folder: Path, **keys: Any) -> Path:
    """A MiniCPM with SiLU, and the file that is made of it."""
    file = make_tiny("minicpm", folder) / "config.json"
    values = json.loads(file.read_text())
    values["hidden_act"] = "silu"
    del values["hidden_act_param"]
    file.write_text(json.dumps(values))
    scales = {
        "embedding_scale": float(values["scale_emb"]),
        "residual_scale": values["scale_depth"] / values["num_hidden_layers"] ** 0.5,
        "logit_scale": values["hidden_size"] / values["dim_model_base"],
    }
    return converted(Case("minicpm", scales | keys, pairs_rows=True), "minicpm", folder)


def test_minicpms_scales_are_read(tmp_path: Path) -> None:
    """Against the family's own reading, which is compared with transformers elsewhere."""
    found, expected = reference_logits(minicpm(tmp_path), IDS), reference_logits(tmp_path, IDS)
    assert relative_difference(found, expected) < 1e-4


def test_minicpm_s_is_not_taken_for_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use its safetensors files"):
        read_config(minicpm(tmp_path, **{"general.name": "MiniCPM-S-1B-sft"}))


def test_fused_rows_that_are_not_q_k_and_v(tmp_path: Path) -> None:
    draft = small_llama()
    names = {one.name: one.name.replace("attn_q.", "attn_qkv.") for one in draft.tensors}
    tensors = tuple(replace(one, name=names[one.name]) for one in draft.tensors)
    (tmp_path / "m.gguf").write_bytes(replace(draft, tensors=tensors).content())
    with pytest.raises(CheckpointError, match="32 rows, of which 32 are queries"):
        read_config(tmp_path / "m.gguf")


def test_values_of_another_length_in_windows_are_refused(tmp_path: Path) -> None:
    case = CASES["gemma4-31b"]
    changed = replace(case, keys=case.keys | {"attention.value_length_swa": 8})
    with pytest.raises(CheckpointError, match="value_length_swa"):
        read_config(written(changed, "gemma4", tmp_path))
