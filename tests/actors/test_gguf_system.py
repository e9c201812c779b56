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
    ("kinds", "names"), [(("Q4_0", "Q4_K"), ("q4", "q4_1")), (("Q6_K", "Q6_K"), ("q6", "q6"))]
)
def test_few_bits_beside_q8(kinds: tuple[str, str], names: tuple[str, str], tmp_path: Path) -> None:
    """Projections and gates in 4 or 6 bits, down rows in 8, a head in float16."""
    path, model = tmp_path / "tiny.gguf", tiny()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    stored = {"attn_": kinds[0], "ffn_": kinds[1], "token_embd": "Q6_K", "output.": "F16"}
    LlamaFile(model.config.to_dict(), tensors, stored).write(path)
    config = read_model(path)
    assert (config.dtype_of("qkv"), config.dtype_of("gate")) == names
    assert (config.dtype_of("down"), config.dtype_of("head")) == ("q8", "float16")
    wanted = reference_logits(path, IDS)
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        one_by_one = system.logits("dense", IDS, (1,))
        together = system.logits("dense", IDS, (4,))
    assert np.array_equal(one_by_one, together)
    spread = float(np.abs(wanted).max())
    # What 8 bits of the vectors cost; random blocks of six bits have scales of any size and sign.
    most = 0.03 if "Q6_K" in kinds else 0.02
    assert np.abs(one_by_one - wanted).max() == pytest.approx(0, abs=most * spread)
