"""Mixtures of GGUF files in a whole system, beside transformers and the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.actors.in_process import InProcessSystem
from tests.reference import relative_difference
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MIXTURES, Variant, make_tiny
from tests.unit import test_mixtures
from tests.unit.test_mixtures import FILES, write_gguf

WAYS = [1], [4], [40]


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("case", FILES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    make_tiny(FILES[case][0], tmp_path)
    write_gguf(tmp_path, case)
    expected = TinyCheckpoint(tmp_path)
    with InProcessSystem(tmp_path / "m.gguf", num_services=2, num_threads=2) as system:
        for way in WAYS:
            found = system.logits("dense", expected.ids, way)
            assert relative_difference(found, expected.logits) < 1e-4


# Formats of experts as files have them.
KINDS = {
    "Q4_0": {"_exps": "Q4_0"},
    "Q4_K_M": {"blk.0.ffn_down_exps": "Q6_K", "_exps": "Q4_K"},
    "shared": {"shexp.weight": "Q8_0", "_exps": "Q8_0"},
}


def quantized(kind: str, folder: Path) -> Path:
    """A GGUF file of Qwen2-MoE, or Mixtral, with experts in these formats."""
    variant, case = ("qwen2-moe", "qwen2moe") if kind == "shared" else ("mixtral", "mixtral")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"shared_expert_intermediate_size": 512, "num_local_experts": 5, "num_experts": 7}
    made = MIXTURES[variant]
    kept = {key: size for key, size in sizes.items() if key in made.keywords or "hidden" in key}
    named = {"wide": Variant(made.func, *made.args, **(made.keywords | kept))}
    with mock.patch.dict(MIXTURES, named):
        make_tiny("wide", folder)
    lengths = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512}
    keys = lengths if kind == "shared" else {}
    write_gguf(folder, case, kinds=KINDS[kind], changed_keys=keys)
    return folder / "m.gguf"


# Dense layers, experts and shared experts have rows of different lengths, each role's in three
# formats, by layer and beside each other.
THREE_SIZES: dict[str, Any] = {
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
}
THREE_KINDS = {
    "ffn_gate_inp": "F32",
    "blk.3.ffn_down_exps": "Q6_K",
    "blk.3.ffn_gate_exps": "Q6_K",
    "blk.3.ffn_up_exps": "Q6_K",
    "ffn_gate_shexp": "Q8_0",
    "ffn_up_shexp": "Q8_0",
    "ffn_down_exps": "Q4_K",
    "ffn_down_shexp": "Q8_0",
    "ffn_down.": "Q4_K",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
}


def three_formats(folder: Path) -> Path:
    """A mixture of four layers, two of them dense, whose FFN is in few bits."""
    made = MIXTURES["glm4-moe-groups"]
    variant = Variant(made.func, *made.args, **(made.keywords | THREE_SIZES))
    name, arch, pairs_rows, keys = FILES["glm4moe"]
    keys = keys | {
        "expert_feed_forward_length": 256,
        "rope.dimension_count": 32,
        "expert_used_count": 3,
        "expert_group_used_count": 2,
    }
    files = {"glm4moe": (name, arch, pairs_rows, keys)}
    with (
        mock.patch.dict(MIXTURES, {name: variant}),
        mock.patch.object(test_mixtures, "FILES", files),
    ):
        make_tiny(name, folder)
        write_gguf(folder, "glm4moe", kinds=THREE_KINDS)
    return folder / "m.gguf"
