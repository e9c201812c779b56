"""PowerInfer's predictors and its own files: read by number and name, executed never."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, CheckpointError, ConfigError, HotcoldError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import has_down_outputs
from hotcold.model.weights.ffn import load_ffn
from hotcold.numba_kernels.formats import Q4
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.powerinfer import import_powerinfer
from hotcold.predictors.predictor_file import read_predictors
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint
from tests.gguf_files import LlamaFile, quantized
from tests.predictor_layers import scores_of
from tests.quantized_models import make_model
from tests.reference import reference_logits
from tests.tiny_models import make_tiny

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


IDS = [3, 7, 1, 40, 33, 20, 3, 3, 44, 17, 5]
RANK = 8


def hugging_face(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The model's config.json and tensors."""
    values = json.loads((path / "config.json").read_text())
    return values, load_file(path / "model.safetensors")


def powerinfer(
    path: Path,
    out: Path,
    kind: str = "F32",
    arch: str = "llama",
    keys: dict[str, float] | None = None,
    other: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the Llama or Bamboo in `path` as PowerInfer's converter does, to `out`.

    llama.cpp's file of the same model is written first; then the magic is PowerInfer's, down
    projections are transposed, and each layer has a predictor. `other` takes the place of these.
    """
    values, tensors = hugging_face(path)
    values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    rng = np.random.default_rng(5)
    extra: dict[str, Any] = {}
    rest = {}
    for name, tensor in tensors.items():
        rows = tensor.astype(np.float32)
        if "down_proj" in name:
            block = f"blk.{name.split('.')[2]}"
            width, neurons = rows.shape
            extra[f"{block}.ffn_down_t.weight"] = np.ascontiguousarray(rows.T)
            extra[f"{block}.fc1.weight"] = rng.standard_normal((RANK, width), np.float32)
            extra[f"{block}.fc2.weight"] = rng.standard_normal((neurons, RANK), np.float32)
        else:
            rest[name] = rows
    kinds = dict.fromkeys(("ffn_", "attn_q", "attn_k", "attn_v", "attn_output"), kind)
    extra |= other or {}
    LlamaFile(values, rest, kinds, keys or {}, extra, arch=arch, names_arch="llama").write(out)
    content = out.read_bytes()
    assert content[:4] == b"GGUF"
    out.write_bytes(b"PWRI" + content[4:])
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama-relu", tmp_path_factory.mktemp("hf") / "m")


@pytest.mark.parametrize(
    ("variant", "arch", "keys", "activation"),
    [
        ("llama-relu", "llama", {"powerinfer.sparse_threshold": 0.25}, "relu"),
        ("bamboo", "bamboo", {"bamboo.attention.sliding_window": 9}, "drelu"),
    ],
)
def test_logits_are_those_of_the_model(
    variant: str, arch: str, keys: dict[str, float], activation: str, tmp_path: Path
) -> None:
    """Bamboo's function is of gate and up."""
    path = make_tiny(variant, tmp_path / "hf")
    file = powerinfer(path, tmp_path / "m.gguf", arch=arch, keys=keys)
    config = read_model(file)
    assert (config.family, config.activation_fn) == (arch, activation)
    np.testing.assert_allclose(reference_logits(file, IDS), reference_logits(path, IDS), atol=1e-5)


def test_quantized_rows_by_neurons_keep_their_numbers(tmp_path: Path) -> None:
    """Of Q4_0 along a neuron's row, as in memory: bit for bit, where llama.cpp's takes 8 bits."""
    path = make_model("q-llama", tmp_path / "hf", dtype="float32")
    file = powerinfer(path, tmp_path / "m.gguf", "Q4_0")
    config, checkpoint = read_model(file), Checkpoint(file)
    assert config.dtype_of("down") == "q4"
    assert not has_down_outputs(checkpoint, config)
    ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    weights = load_ffn(checkpoint, config, ids, include_down_bias=True)
    assert weights.down.dtype == Q4
    _, tensors = hugging_face(path)
    down = next(tensors[name] for name in sorted(tensors) if "0.mlp.down_proj" in name)
    raw, qtype = quantized(np.ascontiguousarray(down.astype(np.float32).T), "Q4_0")
    found = to_float32(weights.down[: config.ffn_size])
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, qtype))


def test_its_predictors_are_used(llama: Path, tmp_path: Path) -> None:
    file = powerinfer(llama, tmp_path / "m", keys={"powerinfer.sparse_threshold": 0.25})
    system, config = prepare_system(file, SystemOptions(mode="lowrank"))
    found = read_predictors(Path(system.predictors_path), ModelIdentity.of(file), config)
    assert found.input_name == "residual"
    rng = np.random.default_rng(5)
    down = rng.standard_normal((RANK, config.hidden_size), np.float32)
    up = rng.standard_normal((config.ffn_size, RANK), np.float32)
    x = rng.standard_normal((1, config.hidden_size)).astype(np.float32)
    layer = found.layers[0]
    assert layer is not None
    scores = scores_of(layer, x)
    expected = np.maximum(x @ down.T, 0) @ up.T - 0.25
    is_clear = np.abs(expected[0]) > 0.05 * np.abs(expected).max()
    np.testing.assert_array_equal((scores > 0)[0, is_clear], (expected > 0)[0, is_clear])
    assert 0.1 < (scores > 0).mean() < 0.9


def test_a_split_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf.generated.gpuidx"), "generic.gpu_index")
    writer.add_tensor("blk.0.gpu_idx", np.zeros(8, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="holds no model; give the model's own file"):
        read_config(tmp_path / "m.gguf.generated.gpuidx")


def test_damaged_files_are_refused(llama: Path, tmp_path: Path) -> None:
    config, file = read_config(llama), tmp_path / "m.gguf"
    width, neurons = config.hidden_size, config.ffn_size

    def require_refusal(says: str, **how: Any) -> None:
        powerinfer(llama, file, **how)
        with pytest.raises(CheckpointError, match=says) as caught:
            prepare_system(file, SystemOptions(mode="lowrank"))
        assert "\n" not in str(caught.value)

    for name, shape, number, says in (
        ("1.fc1", (RANK, width + 32), 1, "which do not fit a model of hidden size"),
        ("1.fc2", (neurons - 1, RANK), 1, "which do not fit a model of hidden size"),
        ("0.fc1", (RANK, width), np.nan, "holds NaN or infinity"),
        ("9.fc2", (neurons, RANK), 1, "blk.9.fc2"),
        ("1.ffn_down_t", (width, neurons), 1, "has shape"),  # by outputs, as llama.cpp's
    ):
        require_refusal(says, other={f"blk.{name}.weight": np.full(shape, number, np.float32)})
    require_refusal("sparse_threshold is nan", keys={"powerinfer.sparse_threshold": float("nan")})


def test_predictors_among_the_weights_are_used(tmp_path: Path) -> None:
    """As in TurboSparse-Mistral's checkpoint, beside gate, up and down."""
    path = make_tiny("bamboo", tmp_path / "m")
    config = read_config(path)
    _, tensors = hugging_face(path)
    rng = np.random.default_rng(1)
    shapes = {1: (RANK, config.hidden_size), 2: (config.ffn_size, RANK)}
    for layer in range(config.num_layers):
        for number, shape in shapes.items():
            name = f"model.layers.{layer}.mlp.predictor.fc{number}.weight"
            tensors[name] = rng.standard_normal(shape, np.float32)
    save_file(tensors, path / "model.safetensors")
    assert read_model(path).activation_fn == "drelu"
    system, _ = prepare_system(path, SystemOptions(mode="lowrank"))
    found = read_predictors(Path(system.predictors_path), ModelIdentity.of(path), config)
    layer_1 = found.layers[1]
    assert isinstance(layer_1, LowRankLayer) and found.input_name == "residual"
    up = tensors["model.layers.1.mlp.predictor.fc2.weight"]
    np.testing.assert_allclose(layer_1.up.view(np.float16), up.T, rtol=1e-3)
