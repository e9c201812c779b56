"""gpt-oss with experts in MXFP4, as published and as a GGUF file, beside the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.model_config import ModelConfig
from tests import reference_experts
from tests.actors.in_process import InProcessSystem
from tests.kernels.quantized_rows import quantized_vectors
from tests.mxfp4_models import WIDE, make_mxfp4
from tests.reference import reference_logits
from tests.tiny_models import VOCAB_SIZE
from tests.unit.test_mixtures import FILES, write_gguf

IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60)


@contextmanager
def rounding(rounds_h: bool) -> Iterator[None]:
    """The reference with experts' inputs as kernels take them, and h where down is transposed."""
    exact = torch.nn.functional.linear

    def linear(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None):
        is_down = weights.shape[1] == WIDE["intermediate_size"]
        if len(weights) >= 64 and (rounds_h or not is_down):  # not a router's
            x = torch.from_numpy(quantized_vectors(x.float().numpy()))
        return exact(x, weights, bias)

    with mock.patch.object(reference_experts, "functional", SimpleNamespace(linear=linear)):
        yield


@contextmanager
def running(path: Path, num_services: int = 1) -> Iterator[tuple[InProcessSystem, ModelConfig]]:
    """The system as a command would start it."""
    options = SystemOptions(context_length=128, num_cpu_actors=num_services)
    system, config = prepare_system(path, options)
    assert system.down_transposed
    assert {config.dtype_of("gate"), config.dtype_of("down")} == {"mxfp4"}
    assert config.dtype_of("qkv") == "float32"
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as found:
        yield found, config


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Beside the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_rounded(found: np.ndarray, rounded: np.ndarray) -> None:
    """The reference rounds as kernels do, but for values close to a half: they move some tokens."""
    assert largest_difference(found, rounded) < 0.02
    differences = np.abs(found - rounded).max(axis=1) / np.abs(rounded).max()
    assert np.median(differences) < 1e-3


def test_as_published(tmp_path: Path) -> None:
    path = make_mxfp4(tmp_path)
    with rounding(rounds_h=True):
        expected = reference_logits(path, IDS)
    exact = reference_logits(path, IDS)
    assert largest_difference(reference_logits(tmp_path / "floats", IDS), exact) < 1e-12
    with running(path, 2) as (system, _):
        alone = system.logits("dense", IDS, (1,))
        for size in (3, 16):
            assert np.array_equal(alone, system.logits("dense", IDS, (size,)))
        prompt = system.logits("dense", IDS, (len(IDS),))
        assert not system.python_answers
    for found in (alone, prompt):
        check_rounded(found, expected)
        assert largest_difference(found, exact) < 0.05


def test_a_gguf_file_holds_the_same(tmp_path: Path) -> None:
    path = make_mxfp4(tmp_path, "gpt-oss-plain")
    name, arch, pairs_rows, keys = FILES["gpt-oss"]
    size = WIDE["intermediate_size"]
    case = name, arch, pairs_rows, keys | {"expert_feed_forward_length": size}
    with mock.patch.dict(FILES, {"gpt-oss": case}):
        write_gguf(tmp_path / "floats", "gpt-oss", kinds={"exps.weight": "MXFP4"})
    file = tmp_path / "floats" / "m.gguf"
    exact = reference_logits(path, IDS)
    assert largest_difference(reference_logits(file, IDS), exact) < 1e-9
    logits = []
    for one in (path, file):
        with running(one) as (system, config):
            assert config.experts is not None
            logits.append(system.logits("dense", IDS, (1,)))
            assert np.array_equal(logits[-1], system.logits("dense", IDS, (16,)))
    check_rounded(logits[1], logits[0])
    with rounding(rounds_h=True):
        check_rounded(logits[1], reference_logits(file, IDS))
