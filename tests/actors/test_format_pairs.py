"""Every two formats that a file may have beside each other, against float32 of the same weights."""

from __future__ import annotations

from itertools import permutations
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
# Which tensors have the first format and which the second one, by parts of their names.
PLACES = {
    "gate and down": (("ffn_gate", "ffn_up"), ("ffn_down",)),
    "layers": (("blk.0.ffn",), ("blk.1.ffn",)),
    "experts and shared": (("_exps",), ("shexp.",)),
}


def written(place: str, pair: tuple[str, str], folder: Path) -> Path:
    """A file with these formats; for experts, a mixture with shared ones."""
    parts = zip(PLACES[place], pair, strict=True)
    kinds = {part: kind for names, kind in parts for part in names}
    if place != "experts and shared":
        file_of(tiny(), folder / "m.gguf", kinds)
        return folder / "m.gguf"
    made = MIXTURES["qwen2-moe"]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    sizes = made.keywords | sizes | {"shared_expert_intermediate_size": 512}
    with mock.patch.dict(MIXTURES, {"wide": Variant(made.func, *made.args, **sizes)}):
        make_tiny("wide", folder)
    lengths = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512}
    write_gguf(folder, "qwen2moe", kinds=kinds, changed_keys=lengths)
    return folder / "m.gguf"


@pytest.mark.sweep(
    keep=3, pair=[("MXFP4", "Q8_0"), ("Q4_K", "Q6_K"), ("Q8_0", "F16"), ("Q4_0", "MXFP4")]
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", list(permutations(FORMATS, 2)), ids="-".join)
def test_two_formats(place: str, pair: tuple[str, str], tmp_path: Path) -> None:
    """In steps of one and of five tokens, to the bit, and in a prompt of other kernels."""
    path = written(place, pair, tmp_path)
    options = SystemOptions(context_length=128, num_cpu_actors=2)
    system, config = prepare_system(path, options)
    wanted = reference_logits(path, IDS)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        one_by_one = running.logits("dense", IDS, (1,))
        assert np.array_equal(one_by_one, running.logits("dense", IDS, (5,)))
        prompt = running.logits("dense", IDS, (48,))
    # Vectors have 8 bits, which may also choose another expert where two scores are nearly equal.
    for found in (one_by_one, prompt):
        errors = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
        assert np.median(errors) < 0.03
        assert errors.max() < (0.5 if place == "experts and shared" else 0.06)
