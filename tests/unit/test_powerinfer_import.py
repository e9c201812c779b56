"""PowerInfer's predictors: read by number, executed never, and chosen by as torch computes them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, CheckpointError, HotcoldError
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.powerinfer import import_powerinfer
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
Weights = dict[str, torch.Tensor]
SIZE = 24
# What the residual stream goes into before the FFN, and the activation.
RESIDUAL_AND_ACTIVATION = {
    "falcon-relu": ("input_layernorm", "mlp.act"),
    "opt-prenorm": ("final_layer_norm", "activation_fn"),
}


def weights(config: ModelConfig, layer: int, dtype: torch.dtype = torch.float16) -> Weights:
    """Random ones that the three formats hold alike, as bfloat16's numbers of middling size."""
    source = torch.Generator().manual_seed(layer)
    down = torch.randn(SIZE, config.hidden_size, generator=source).bfloat16()
    up = (torch.randn(config.ffn_size, SIZE, generator=source) * 0.3 + 0.02).bfloat16()
    return {"fc1.weight": down.to(dtype), "fc2.weight": up.to(dtype)}


def write_folder(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float16) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(config.num_layers):
        torch.save(weights(config, i, dtype), folder / f"model_{i}.pt")
    return folder


def masked_logits(checkpoint: TinyCheckpoint, variant: str) -> tuple[np.ndarray, float, float]:
    """transformers' logits where only the expected neurons count; the share that they are.

    Last the smallest distance from zero of a score that decided.
    """
    model, config = checkpoint._model(), read_config(checkpoint.path)
    residuals: dict[int, torch.Tensor] = {}
    shares, margins = [], []
    before, activation = RESIDUAL_AND_ACTIVATION[variant]

    def keep(layer: int, _: torch.nn.Module, x: tuple[torch.Tensor]) -> None:
        residuals[layer] = x[0].reshape(-1, config.hidden_size)

    def mask(layer: int, _m: torch.nn.Module, _x: object, h: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = (w.float() for w in weights(config, layer).values())
        scores = torch.relu(residuals[layer] @ fc1.T) @ fc2.T
        shares.append(float((scores > 0).float().mean()))
        margins.append(float(scores.abs().min()))
        return h * (scores > 0).reshape(h.shape)

    layers = next(m for n, m in model.named_modules() if n.split(".")[-1] in ("layers", "h"))
    for i, layer in enumerate(layers):
        layer.get_submodule(before).register_forward_pre_hook(partial(keep, i))
        layer.get_submodule(activation).register_forward_hook(partial(mask, i))
    with torch.no_grad():
        logits = model(torch.from_numpy(checkpoint.ids)[None]).logits[0].numpy()
    return logits, float(np.mean(shares)), min(margins)


@pytest.mark.parametrize("variant", RESIDUAL_AND_ACTIVATION)
def test_the_neurons_are_those_that_torch_expects(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    checkpoint = tiny(variant)
    config = read_config(checkpoint.path)
    expected, share, margin = masked_logits(checkpoint, variant)
    assert 0.3 < share < 0.8 and margin > 1e-6  # no neuron hangs on a rounding
    assert np.abs(expected - checkpoint.logits).max() > 0.1 * np.abs(expected).max()
    predictors = import_powerinfer(write_folder(tmp_path / "pt", config), config)
    with InProcessSystem(checkpoint.path, 2, 2, copying=True) as system:
        arranged = predictors.arranged([[s] * config.num_layers for s in system.shards()])
        for sizes in ([1], [8, 3]):
            found = system.logits("lowrank", checkpoint.ids, sizes, predictor=arranged)
            np.testing.assert_allclose(
                found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()
            )


@pytest.fixture(scope="module")
def config(tiny: Tiny) -> ModelConfig:
    return read_config(tiny("llama-relu").path)


def test_layers_are_found_by_number(config: ModelConfig, tmp_path: Path) -> None:
    """Twelve of them: in the order of names 10 and 11 would come before 2."""
    deep = replace(config, num_layers=12)
    found = import_powerinfer(write_folder(tmp_path / "pt", deep, torch.bfloat16), deep)
    assert found.input_name == "residual" and len(found.layers) == 12
    assert found.qualities is None and found.target_recall is None
    for i, layer in enumerate(found.layers):
        assert isinstance(layer, LowRankLayer)
        expected = weights(deep, i)
        np.testing.assert_array_equal(layer.down.view(np.float16), expected["fc1.weight"].numpy())
        np.testing.assert_array_equal(layer.up.view(np.float16), expected["fc2.weight"].T.numpy())
        assert layer.up.flags.c_contiguous and (layer.scales == 1).all()
        assert not layer.thresholds.any()


def test_numbers_beyond_float16_stay_finite(config: ModelConfig, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pt", config, torch.float32)
    first = weights(config, 0, torch.float32)
    first["fc1.weight"][0, :2] = torch.tensor([1e6, -1e6])
    torch.save(first, folder / "model_0.pt")
    layer = import_powerinfer(folder, config).layers[0]
    assert isinstance(layer, LowRankLayer)
    assert layer.down.view(np.float16)[0, :2].tolist() == [65504, -65504]


def refused(folder: Path, config: ModelConfig, file: str) -> str:
    with pytest.raises(HotcoldError) as caught:
        import_powerinfer(folder, config)
    assert isinstance(caught.value, ArtifactError | CheckpointError)
    text = str(caught.value)
    assert str(folder / file) in text and len(text.splitlines()) == 1
    return text


def test_folders_of_another_model_and_truncated_files(config: ModelConfig, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pt", config)
    deep = replace(config, num_layers=config.num_layers + 1)
    assert "is missing" in refused(folder, deep, f"model_{config.num_layers}.pt")
    short = replace(config, num_layers=config.num_layers - 1)
    assert "belong to another model" in refused(folder, short, f"model_{short.num_layers}.pt")
    content = (folder / "model_2.pt").read_bytes()
    for length in (0, 1000, -1):
        (folder / "model_2.pt").write_bytes(content[:length])
        assert "download it again" in refused(folder, config, "model_2.pt")
    (folder / "model_1.pt").unlink()
    assert "is missing" in refused(folder, config, "model_1.pt")
    (folder / "model_1.pt").mkdir()
    assert "is missing" in refused(folder, config, "model_1.pt")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fc1, fc2: (fc1.T.contiguous(), fc2.T.contiguous()), "belongs to another model"),
        (lambda fc1, fc2: (fc1[:, 1:], fc2), "belongs to another model"),
        (lambda fc1, fc2: (fc1.double(), fc2), "has no matrix fc1.weight"),
        (lambda fc1, fc2: (fc1,), "has no matrix fc2.weight"),
        (lambda fc1, fc2: (fc1, fc2 * torch.nan), "fc2.weight holds NaN or infinity"),
        (lambda fc1, fc2: (3, fc2), "other things than tensors"),
    ],
)
def test_files_that_are_no_predictors(
    config: ModelConfig, tmp_path: Path, change: Callable[..., tuple[Any, ...]], says: str
) -> None:
    folder = write_folder(tmp_path / "pt", config)
    right = weights(config, 1)
    spoilt = dict(zip(right, change(*right.values()), strict=False))
    torch.save(spoilt, folder / "model_1.pt")
    assert says in refused(folder, config, "model_1.pt")


class _Creates:
    """Unpickled carelessly, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_executed(config: ModelConfig, tmp_path: Path, zipped: bool) -> None:
    folder, trace = write_folder(tmp_path / "pt", config), tmp_path / "trace"
    content = weights(config, 0) | {"extra": _Creates(trace)}
    torch.save(content, folder / "model_0.pt", _use_new_zipfile_serialization=zipped)
    refused(folder, config, "model_0.pt")
    (folder / "model_0.pt").write_bytes(pickle.dumps(content, protocol=2))
    refused(folder, config, "model_0.pt")
    assert not trace.exists()
    pickle.loads((folder / "model_0.pt").read_bytes())
    assert trace.exists()  # so it would have been
