"""Mixtures in GGUF files of few bits: down rows of experts as the file has them, of any width."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits
from tests.tiny_models import MIXTURES, VOCAB_SIZE, Variant, make_tiny
from tests.unit import test_mixtures
from tests.unit.test_mixtures import FILES, write_gguf

IDS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40)
# Dense layers, experts and shared experts have rows of different lengths, in three formats.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
}
KINDS = {
    "ffn_gate_inp": "F32",
    "blk.3.ffn_down_exps": "Q6_K",
    "ffn_down_exps": "Q4_K",
    "ffn_down_shexp": "Q8_0",
    "ffn_down.": "Q4_K",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
}


def write(folder: Path, num_chosen: int = 3) -> Path:
    """A mixture of four layers, two of them dense, whose FFN is in few bits."""
    made = MIXTURES["glm4-moe-groups"]
    groups = {"topk_group": 2 if num_chosen < 8 else 4, "num_experts_per_tok": num_chosen}
    variant = Variant(made.func, *made.args, **(made.keywords | SIZES | groups))
    name, arch, pairs_rows, keys = FILES["glm4moe"]
    keys = keys | {
        "expert_feed_forward_length": 256,
        "rope.dimension_count": 32,
        "expert_used_count": num_chosen,
        "expert_group_used_count": groups["topk_group"],
    }
    files = {"glm4moe": (name, arch, pairs_rows, keys)}
    with (
        mock.patch.dict(MIXTURES, {name: variant}),
        mock.patch.object(test_mixtures, "FILES", files),
    ):
        make_tiny(name, folder)
        write_gguf(folder, "glm4moe", kinds=KINDS)
    return folder / "m.gguf"


@pytest.mark.parametrize("num_chosen", [3, pytest.param(8, marks=pytest.mark.thorough)])
def test_logits_are_the_references(tmp_path: Path, num_chosen: int) -> None:
    """To what 8 bits of vectors cost, which may let a token choose another expert of eight."""
    path = write(tmp_path, num_chosen)
    system, config = prepare_system(path, SystemOptions(context_length=128))
    assert system.down_transposed
    wanted = reference_logits(path, IDS)
    specs = service_specs(system, config)
    with InProcessSystem(path, num_threads=3, specs=specs) as running:
        one_by_one = running.logits("dense", IDS, (1,))
        for size in (4, 10, 32):
            assert np.array_equal(one_by_one, running.logits("dense", IDS, (size,)))
        prompt = running.logits("dense", IDS, (40,))
    for found in (one_by_one, prompt):
        errors = np.abs(found - wanted).max(axis=1)
        assert np.median(errors) < 0.03 * np.abs(wanted).max()
        assert num_chosen < 8 or errors.max() < 0.08 * np.abs(wanted).max()
