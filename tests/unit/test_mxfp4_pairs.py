"""MXFP4 in safetensors files: what is shown, refused, converted; damaged pairs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.support.model_facts import facts_of
from hotcold.model.config.build import read_config
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import CheckpointError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import has_down_outputs
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.model.weights.sizes import num_parameters
from hotcold.numba_kernels.formats import MXFP4, Q8, block_dtype
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.load.quantize import quantize_rows
from tests.mxfp4_models import make_mxfp4

SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
GATE_UP, DOWN = ("model.layers.1.mlp.experts." + name for name in ("gate_up_proj", "down_proj"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), "gpt-oss", 5, **SMALL)


def test_pairs_are_tensors_of_blocks(model: Path) -> None:
    checkpoint, floats = Checkpoint(model), Checkpoint(model.parent / "floats")
    for name in (GATE_UP, DOWN):
        blocks = f"{name}_blocks"
        assert checkpoint.dtype(blocks) == block_dtype("MXFP4")
        assert checkpoint.format_name(blocks) == "MXFP4"
        found = to_float32(np.asarray(checkpoint.array(blocks)))
        assert np.array_equal(found, floats.array(name).swapaxes(1, 2))
    dtypes = [checkpoint.loaded_dtype(f"{name}_blocks") for name in (GATE_UP, DOWN)]
    assert dtypes == [MXFP4, Q8]  # the second with a row a neuron
    assert checkpoint.own_dtype(f"{DOWN}_blocks") == MXFP4
    assert has_down_outputs(checkpoint, read_config(model))
    config = read_config(model)
    assert num_parameters(checkpoint, config) == num_parameters(floats, config)
    facts = facts_of(model)
    of_experts = 2 * 5 * 3 * 64 * 32 // 32 * 17
    assert facts["stored_bytes"]["MXFP4"] == of_experts


@pytest.mark.parametrize("dtype", ["", "q8"])
def test_rows_of_neurons(model: Path, dtype: str) -> None:
    """Gate and up rows as stored, or all quantized again; down rows always are."""
    config, checkpoint = read_config(model), Checkpoint(model)
    size = config.ffn_sizes[0]
    ids = [
        np.sort(np.random.default_rng(n).permutation(size)[:50]).astype(np.int32) for n in (0, 1)
    ]
    rows = [
        load_ffn(Checkpoint(path), config, ids, include_down_bias=True, dtype=kind)
        for path, kind in ((model, dtype), (model.parent / "floats", ""))
    ]
    for role in ("gate", "up", "down"):
        found, exact = (getattr(one, role) for one in rows)
        kept = role != "down" and not dtype
        assert found.dtype == (MXFP4 if kept else requested_dtype("q8"))
        if kept:
            assert np.array_equal(to_float32(found), exact)
        else:
            assert np.array_equal(found, quantize_rows(exact, Q8))
    assert checkpoint.own_dtype(f"{DOWN}_blocks") == MXFP4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), "_blocks"),
        (
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, :-1].copy()}),
            "beside scales",
        ),
        (lambda t: t[f"{DOWN}_scales"].fill(255), "has NaN or infinite values"),
        (
            lambda t: t.update(
                {f"{GATE_UP}_{k}": t[f"{GATE_UP}_{k}"][:, :-2].copy() for k in ("blocks", "scales")}
            ),
            "has shape",
        ),
    ],
)
def test_damaged_pairs(
    model: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], said: str
) -> None:
    tensors, path = load_file(model / "model.safetensors"), tmp_path
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model / "config.json", path)
    with pytest.raises(CheckpointError) as error:
        config = read_model(path)
        ids = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
        load_ffn(Checkpoint(path), config, ids, include_down_bias=True)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_what_it_cannot_become(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has weights in MXFP4.*$"):
        write_quantized(model, tmp_path / "q8", "q8")
    with pytest.raises(UsageError, match=r"is quantized to MXFP4 already.*$"):
        read_model(model, "f16")
