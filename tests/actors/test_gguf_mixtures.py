"""Mixtures of GGUF files in a whole system, beside transformers and the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits, relative_difference
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MIXTURES, Variant, make_tiny
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


# Formats of experts as files have them; most of what is kept of gate and down in memory.
KINDS = {
    "Q4_0": ({"_exps": "Q4_0"}, ("q4", "q4")),
    "Q4_K_M": ({"blk.0.ffn_down_exps": "Q6_K", "_exps": "Q4_K"}, ("q4_k", "q4_k")),
    "shared": ({"shexp.weight": "Q8_0", "_exps": "Q8_0"}, ("q8", "q8")),
}


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("kind", "num_services", "pieces"),
    [("Q4_K_M", 2, 2), ("Q4_0", 1, 1), ("shared", 1, 1)],
)
def test_quantized_experts_are_served(
    kind: str, num_services: int, pieces: int, tmp_path: Path
) -> None:
    """Down projections keep their rows, one an output; the bits do not depend on a step's size."""
    path = quantized(kind, tmp_path)
    system, config = prepare_system(
        path, SystemOptions(context_length=128, num_cpu_actors=num_services)
    )
    assert system.down_transposed
    system = replace(system, expert_pieces=pieces)
    gate, down = KINDS[kind][1]
    assert (config.dtype_of("gate"), config.dtype_of("down")) == (gate, down)
    ids = np.random.default_rng(1).integers(0, 101, 40)
    wanted = reference_logits(path, ids)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        one_by_one = running.logits("dense", ids, (1,))
        for size in (3, 8):
            assert np.array_equal(one_by_one, running.logits("dense", ids, (size,)))
        prompt = running.logits("dense", ids, (40,))
    # Vectors have 8 bits, which may also choose another expert where two scores are nearly equal.
    for found in (one_by_one, prompt):
        error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
        assert np.median(error) < 0.03 and error.max() < 0.5


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
    write_gguf(folder, case, kinds=KINDS[kind][0], changed_keys=keys)
    return folder / "m.gguf"
