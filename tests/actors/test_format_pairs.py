"""Every two formats that a file may have beside each other, against float32 of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.numba_kernels.formats import BLOCK_FORMATS, FLOAT_FORMATS
from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits
from tests.tiny_models import MIXTURES, VOCAB_SIZE, Variant, make_tiny
from tests.unit.test_gguf_model import file_of, tiny
from tests.unit.test_mixtures import write_gguf

IDS = np.random.default_rng(7).integers(0, VOCAB_SIZE, 48)
FORMATS = [kind.short.upper() for kind in FLOAT_FORMATS.values()]
FORMATS += [block.name for block in BLOCK_FORMATS.values()]
EXPERTS = 7


def kinds(pair: tuple[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Gate and up of the first format, down of the second; so one layer, the next one swapped."""
    one, other = pair
    found: dict[str, str] = {}
    for layer, name in product((0, 1), names):
        first, second = (one, other) if (layer == 0) == (name == names[0]) else (other, one)
        rows = {"gate": first, "up": first, "down": second}
        found |= {f"blk.{layer}.ffn_{part}{name}.": kind for part, kind in rows.items()}
    return found


def dense(pair: tuple[str, str], folder: Path) -> None:
    file_of(tiny(), folder / "m.gguf", kinds(pair, ("",)))


def mixture(pair: tuple[str, str], folder: Path) -> None:
    """With shared experts, of the formats the other way round. All experts are chosen."""
    made = MIXTURES["qwen2-moe"]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts_per_tok": EXPERTS}
    sizes = made.keywords | sizes | {"shared_expert_intermediate_size": 512}
    with mock.patch.dict(MIXTURES, {"wide": Variant(made.func, *made.args, **sizes)}):
        make_tiny("wide", folder)
    keys = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512}
    keys["expert_used_count"] = EXPERTS
    write_gguf(folder, "qwen2moe", kinds=kinds(pair, ("_exps", "_shexp")), changed_keys=keys)


@pytest.mark.sweep(keep=2, pair=[("Q4_K", "Q6_K"), ("F16", "Q8_0")])
@pytest.mark.parametrize("written", [dense, mixture])
@pytest.mark.parametrize("pair", list(combinations(FORMATS, 2)), ids="-".join)
def test_two_formats(
    written: Callable[[tuple[str, str], Path], None], pair: tuple[str, str], tmp_path: Path
) -> None:
    """In steps of one and of five tokens, to the bit, and in a prompt of other kernels."""
    path = tmp_path / "m.gguf"
    written(pair, tmp_path)
    options = SystemOptions(context_length=128, num_cpu_actors=2)
    system, config = prepare_system(path, options)
    wanted = reference_logits(path, IDS)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        one_by_one = running.logits("dense", IDS, (1,))
        assert np.array_equal(one_by_one, running.logits("dense", IDS, (5,)))
        prompt = running.logits("dense", IDS, (48,))
    # Vectors have 8 bits; after random blocks with minima a few tokens' are nearly cancelled.
    for found in (one_by_one, prompt):
        errors = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
        assert np.median(errors) < 0.03
        assert np.quantile(errors, 0.85) < 0.06
        assert errors.max() < 0.6  # of other tokens it would be 1 or more
