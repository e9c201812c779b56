"""A system of a GGUF file whose kinds of matrices are in different formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.setup.preflight import read_model
from model.reference import reference_logits
from tests.actors.in_process import InProcessSystem
from tests.gguf_files import LlamaFile
from tests.unit.test_gguf_model import tiny

IDS = np.array([3, 7, 1, 90, 55, 20, 3, 3, 64, 17])


@pytest.mark.parametrize(
    ("kind", "name"), [("Q4_0", "q4"), ("Q4_1", "q4_1"), ("Q4_K", "q4_1"), ("Q6_K", "q6")]
)
def test_few_bits_beside_q8(kind: str, name: str, tmp_path: Path) -> None:
    """Gates and projections in 4 or 6 bits, their down projections in 8, a head in float16."""
    path, model = tmp_path / "tiny.gguf", tiny()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    kinds = {"attn_": kind, "ffn_": kind, "token_embd": "Q6_K", "output.": "F16"}
    LlamaFile(model.config.to_dict(), tensors, kinds).write(path)
    config = read_model(path)
    assert {config.dtype_of("qkv"), config.dtype_of("gate")} == {name}
    assert (config.dtype_of("down"), config.dtype_of("head")) == ("q8", "float16")
    wanted = reference_logits(path, IDS)
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        one_by_one = system.logits("dense", IDS, (1,))
        together = system.logits("dense", IDS, (4,))
    assert np.array_equal(one_by_one, together)
    spread = float(np.abs(wanted).max())
    # What 8 bits of the vectors cost; random blocks of six bits have scales of any size and sign.
    most = 0.03 if kind == "Q6_K" else 0.02
    assert np.abs(one_by_one - wanted).max() == pytest.approx(0, abs=most * spread)
