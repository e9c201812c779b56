"""Files of others' quantization methods: every weight beside what the method says it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.support.model_checks import REFUSED, check_files
from hotcold.jobs.support.model_facts import facts_of, lines_of
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import numpy_dtype, requested_dtype
from hotcold.model.errors import CheckpointError, ConfigError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import check_tensors, stored_config, why_no_drafts
from hotcold.model.weights.down_outputs import has_down_outputs, read_down_outputs
from hotcold.model.weights.ffn import FfnWeights, load_ffn
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.model.weights.sizes import num_parameters, stored_bytes
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.formats import MXFP4, Q8, block_dtype
from hotcold.numba_kernels.load.convert import from_float32, to_float32
from hotcold.numba_kernels.load.quantize import quantize_rows
from tests.draft_layer_models import DraftedModel
from tests.mxfp4_models import make_mxfp4
from tests.packed_models import EXACT, METHODS, make_packed

Q_PROJ, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model of each method, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def find(name: str, variant: str = "llama") -> Path:
        key = name, variant
        if key not in made:
            made[key] = make_packed(tmp_path_factory.mktemp("packed"), *key)
        return made[key]

    return find


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object], to: Path) -> Path:
    """Write the model with other tensors to the folder `to`, which is returned."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((path / "config.json").read_text())
    return to


def ffn_of(path: Path, config: ModelConfig | None = None, dtype: str = "") -> FfnWeights:
    """All neurons, as they are loaded."""
    config = config or read_config(path)
    ids = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    return load_ffn(Checkpoint(path), config, ids, include_down_bias=True, dtype=dtype)


def rows_of(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype | None) -> np.ndarray:
    """The matrix as it is loaded."""
    with TensorReader(Checkpoint(path), dtype=dtype) as reader:
        rows = reader.matrix(shape, name, dtype=reader.own_dtype(name))
        reader.rows(name, shape[0], rows)
        return rows


@pytest.mark.parametrize("name", METHODS)
def test_every_weight(name: str, models: Callable[..., Path]) -> None:
    path, method = models(name), METHODS[name]
    checkpoint, floats = Checkpoint(path), Checkpoint(path.parent / "floats")
    weights = [each for each in floats.names() if each.endswith("_proj.weight")]
    assert weights
    for each in weights:
        expected = floats.array(each)
        assert checkpoint.format_name(each) == method.format_name
        assert np.array_equal(to_float32(np.asarray(checkpoint.array(each))), expected)
        rows = rows_of(path, each, expected.shape, None)
        assert rows.dtype == numpy_dtype(method.held)
        if name in EXACT:
            assert np.array_equal(to_float32(rows), expected)
        elif method.held == "nvfp4":  # which multiplies with what the file divides by
            assert np.allclose(to_float32(rows), expected, rtol=2.0**-22, atol=0)
        elif method.held == "nf4":
            assert np.abs(to_float32(rows) - expected).max() < np.abs(expected).max() / 250
        else:
            assert np.array_equal(rows, quantize_rows(expected, Q8))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_said(name: str, models: Callable[..., Path]) -> None:
    path = models(name)
    config, checkpoint = read_config(path), Checkpoint(path)
    assert has_down_outputs(checkpoint, config)
    floats = Checkpoint(path.parent / "floats")
    assert num_parameters(checkpoint, config) == num_parameters(floats, config)
    size = (path / "model.safetensors").stat().st_size
    assert 0.9 * size < sum(stored_bytes(checkpoint).values()) < size
    note = checkpoint.conversion_note(("qkv", "down"))
    method = METHODS[name]
    if name not in EXACT and method.held != "nvfp4":
        assert f"{method.format_name}: read as {method.held}" in note
    facts = facts_of(path)  # in mode exact, which groups down projections by neurons
    said = facts["conversion"]
    assert ("read as", said) in lines_of(facts)
    if name in EXACT:
        assert f"{method.format_name} of down projections: read as q8" in said
    elif method.held == "q8":
        assert said == note


@pytest.mark.parametrize("name", ["gptq-zeros", "fp8", "ct-nvfp4", "nf4-nested"])
def test_columns_of_down_projections(name: str, models: Callable[..., Path]) -> None:
    """Those that are cut for several services are the whole's."""
    path = models(name, "wide")
    config, checkpoint = read_config(path), Checkpoint(path)
    ids = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    runs = np.array([[[[0, 512], [512, 768]]]] * config.num_layers)
    with TensorReader(checkpoint) as reader:
        whole = read_down_outputs(reader, config, ids)
        parts = read_down_outputs(reader, config, ids, runs)
    for layer in range(config.num_layers):
        expected = to_float32(whole.matrix(layer, 0))
        found = [to_float32(parts.matrix(layer, at)) for at in range(2)]
        assert np.array_equal(np.hstack(found), expected)
        assert np.abs(expected).max() > 0


@pytest.mark.parametrize("name", ["gptq-zeros", "fp8", "nvfp4"])
def test_experts(name: str, models: Callable[..., Path]) -> None:
    path = models(name, "mixture")
    config = read_config(path)
    found, exact = (ffn_of(each, config) for each in (path, path.parent / "floats"))
    for rows, expected in ((found.gate, exact.gate), (found.up, exact.up)):
        if name in EXACT:
            assert np.array_equal(to_float32(rows), expected)
        else:
            assert np.array_equal(rows, quantize_rows(expected, Q8))
    assert np.array_equal(found.down, quantize_rows(exact.down, Q8))


@pytest.mark.parametrize("name", ["fp8", "ct-int4"])
def test_latent_attention(name: str, models: Callable[..., Path]) -> None:
    """Keys, which stand in rows of latent numbers, are transposed, so quantized anew."""
    path = models(name, "latent")
    config = read_config(path)
    check_tensors(Checkpoint(path), config)
    found, exact = (
        load_attention(Checkpoint(each), config).latent for each in (path, path.parent / "floats")
    )
    for layer in range(config.num_layers):
        assert np.array_equal(found.keys.matrix(layer), quantize_rows(exact.keys.matrix(layer), Q8))
        for mine, theirs in ((found.queries, exact.queries), (found.values, exact.values)):
            rows, expected = mine.matrix(layer), theirs.matrix(layer)
            if name in EXACT:
                assert np.array_equal(to_float32(rows), expected)
            else:
                assert np.array_equal(rows, quantize_rows(expected, Q8))


def test_fp8_in_16_bits(models: Callable[..., Path]) -> None:
    """As transformers dequantizes it; down projections too, whose rows become neurons."""
    path = models("fp8")
    config = read_model(path, "bf16")
    assert config.dtype == "bfloat16"
    found, exact = ffn_of(path, config, "bf16"), ffn_of(path.parent / "floats", config)
    for role in ("gate", "up", "down"):
        expected = from_float32(getattr(exact, role), np.dtype(np.int16))
        assert np.array_equal(getattr(found, role), expected)


def test_layers_that_are_not_quantized(models: Callable[..., Path], tmp_path: Path) -> None:
    """One role's matrices have one format, in which none loses what others do not."""
    path, own = models("ct-int4"), "model.layers.1.mlp.gate_proj.weight"
    weights = load_file(path.parent / "floats" / "model.safetensors")[own].bfloat16()

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for end in ("_packed", "_scale", "_shape"):
            del tensors[own + end]
        tensors[own] = weights

    checkpoint = Checkpoint(changed(path, unpack, tmp_path))
    assert {checkpoint.loaded_dtype(own.replace(".1.", f".{n}.")) for n in (0, 1)} == {Q8}
    assert checkpoint.own_dtype(own) == np.int16
    expected = quantize_rows(weights.float().numpy(), Q8)
    first = read_config(tmp_path).ffn_sizes[0]
    assert np.array_equal(ffn_of(tmp_path).gate[first:][: len(expected)], expected)


def test_zero_biases_of_gptq_are_no_tensors(models: Callable[..., Path], tmp_path: Path) -> None:
    name = f"{Q_PROJ}.bias"
    for number in (0.0, 1.0):

        def add(tensors: dict[str, torch.Tensor], number: float = number) -> None:
            tensors[name] = torch.full((256,), number, dtype=torch.float16)

        path = changed(models("gptq"), add, tmp_path)
        assert Checkpoint(path).has(name) == bool(number)


def test_modules_of_other_bits(models: Callable[..., Path], tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: how many bits one has is what its words and columns say."""
    path, other = models("gptq-zeros"), models("gptq-8-zeros")
    of_other = load_file(other / "model.safetensors").items()
    changed(path, lambda t: t.update(p for p in of_other if p[0].startswith(Q_PROJ)), tmp_path)
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"]["dynamic"] = {"+:.*q_proj": {"bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    checkpoint = Checkpoint(tmp_path)
    for each, name in ((other, f"{Q_PROJ}.weight"), (path, f"{DOWN}.weight")):
        expected = Checkpoint(each.parent / "floats").array(name)
        assert np.array_equal(to_float32(np.asarray(checkpoint.array(name))), expected)
    assert checkpoint.format_name(f"{Q_PROJ}.weight") == "GPTQ8"


def test_doctor_leaves_no_part_out(models: Callable[..., Path]) -> None:
    for name in ("awq", "fp8", "nf4-nested"):
        found = check_files(models(name))
        assert not [one for one in found if one.subject in ("left out", REFUSED)]


def cut(tensors: dict[str, torch.Tensor], end: str, *sides: slice) -> None:
    tensors[Q_PROJ + end] = tensors[Q_PROJ + end][sides].clone()


def fill(tensors: dict[str, torch.Tensor], end: str, value: float) -> None:
    tensors[Q_PROJ + end] = torch.full_like(tensors[Q_PROJ + end].float(), value).to(
        tensors[Q_PROJ + end].dtype
    )


def state(tensors: dict[str, torch.Tensor], text: str) -> None:
    name = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)


HUGE = {"shape": [256, 256], "blocksize": 64, "nested_blocksize": 1 << 30, "nested_offset": 0}
DAMAGES: list[tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = [
    ("fp8", lambda t: cut(t, ".weight_scale_inv", slice(0, 0)), "scales"),
    ("fp8", lambda t: fill(t, ".weight_scale_inv", np.inf), "NaN or infinite"),
    ("fp8", lambda t: fill(t, ".weight", np.nan), "NaN or infinite"),
    ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"), "F8_E4M3"),
    ("fp8-bf16", lambda t: fill(t, ".weight_scale_inv", 1e30), "too large"),
    ("ct-int4", lambda t: fill(t, ".weight_scale", np.nan), "NaN or infinite"),
    ("ct-int4", lambda t: cut(t, ".weight_scale", slice(0, 5)), "shape [256, 8]"),
    ("ct-int4", lambda t: cut(t, ".weight_scale", slice(None), slice(0, 3)), "3 scales for 256"),
    ("ct-int4", lambda t: cut(t, ".weight_packed", slice(None), slice(0, 3)), "rows of 24 weights"),
    ("ct-int4", lambda t: t.pop(f"{Q_PROJ}.weight_scale"), "q_proj"),
    ("ct-int4-zeros", lambda t: cut(t, ".weight_zero_point", slice(0, 3)), "shape [32, 4]"),
    ("ct-nvfp4", lambda t: fill(t, ".weight_global_scale", 0.0), "NaN or infinite"),
    ("nvfp4", lambda t: fill(t, ".weight_scale", -1.0), "above zero"),
    ("nvfp4", lambda t: fill(t, ".weight_scale", np.nan), "NaN or infinite"),
    ("nvfp4", lambda t: fill(t, ".weight_scale_2", np.inf), "NaN or infinite"),
    ("nvfp4", lambda t: cut(t, ".weight_scale", slice(None), slice(0, 3)), "shape [256, 16]"),
    ("nvfp4", lambda t: t.update({f"{Q_PROJ}.weight_scale_2": torch.ones(2)}), "one number"),
    ("gptq", lambda t: fill(t, ".qzeros", 0), "sym"),
    ("gptq", lambda t: cut(t, ".qzeros", slice(0, 0)), "shape [2, 32]"),
    ("gptq", lambda t: cut(t, ".qweight", slice(0, 15)), "q_proj"),
    ("gptq-order", lambda t: fill(t, ".g_idx", 99), "from 0 to 7"),
    ("awq-32", lambda t: cut(t, ".qzeros", slice(None), slice(0, 3)), "shape [8, 32]"),
    ("awq-32", lambda t: t.update({f"{Q_PROJ}.scales": t[f"{Q_PROJ}.scales"].int()}), "F16"),
    ("nf4", lambda t: state(t, "{}"), "shape and blocksize"),
    ("nf4", lambda t: state(t, "["), "JSON"),
    ("nf4", lambda t: state(t, '{"shape": [128, 4096], "blocksize": 64}'), "524288 weights"),
    ("nf4", lambda t: state(t, '{"shape": [128, 128], "blocksize": 0}'), "blocksize"),
    ("nf4", lambda t: cut(t, ".weight.absmax", slice(0, 7)), "shape [1024]"),
    ("nf4-nested", lambda t: t.pop(f"{Q_PROJ}.weight.nested_absmax"), "nested_absmax"),
    ("llm-int8", lambda t: cut(t, ".SCB", slice(0, 9)), "shape [256]"),
    ("fp8", lambda t: t.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 2).double()}), "F64"),
    ("ct-int8", lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(256, 1).int()}), "point"),
    ("nf4-nested", lambda t: state(t, json.dumps(HUGE)), "nested_absmax"),
    ("ct-mxfp4", lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(256, 8)}), "U8"),
    ("ct-mxfp4", lambda t: fill(t, ".weight_scale", 255), "NaN or infinite"),
]


@pytest.mark.parametrize(("name", "change", "said"), DAMAGES)
def test_damaged_files(
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    said: str,
    models: Callable[..., Path],
    tmp_path: Path,
) -> None:
    changed(models(name), change, tmp_path)
    with pytest.raises(CheckpointError) as error:
        rows_of(tmp_path, f"{Q_PROJ}.weight", (256, 256), None)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq", {"bits": 3}, "of gptq has bits 3"),
        ("gptq", {"bits": 4.0}, "of gptq has bits 4.0"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("awq", {"version": "gemv"}, "version"),
        ("ct-int4", {"format": "marlin-24"}, "marlin-24"),
        ("ct-int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ("ct-int4", {"quant_method": "hqq"}, "hqq"),
        ("gptq", {"quant_method": None}, "MLX"),
        ("ct-int4", {"quant_method": "auto-round", "packing_format": "x"}, "auto-round"),
    ],
)
def test_what_is_not_read(
    name: str, change: dict[str, object], said: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    values = json.loads((models(name) / "config.json").read_text())
    values["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="use the model that is not quantized") as error:
        read_config(tmp_path)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_what_it_cannot_become(models: Callable[..., Path], pairs: Path, tmp_path: Path) -> None:
    for path, said in ((models("fp8"), "has weights in FP8"), (pairs, "has weights in MXFP4")):
        with pytest.raises(UsageError, match=rf"{said}.*$"):
            write_quantized(path, tmp_path / "q8", "q8")
    for path, method in ((models("gptq"), "GPTQ4"), (pairs, "MXFP4")):
        with pytest.raises(UsageError, match=rf"is quantized to {method} already.*$"):
            read_model(path, "f16")


def test_a_layer_that_drafts_has_formats_of_its_own(tmp_path: Path) -> None:
    """As most repositories have it: experts are packed, and that layer is not."""
    sizes = {
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    }
    path = DraftedModel("glm4-moe-groups", tmp_path / "m", **sizes).path
    tensors, (config, make) = load_file(path / "model.safetensors"), METHODS["awq-32"].packing
    rng = np.random.default_rng(3)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        if base.endswith("_proj") and "layers.4." not in name:
            packed |= {base + end: part for end, part in make(rng, *tensor.shape)[0].items()}
        else:
            packed[name] = tensor
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    checkpoint, model = Checkpoint(path), read_config(path)
    assert not why_no_drafts(checkpoint, model)
    held = stored_config(checkpoint, model)
    assert (held.dtype, held.dtype_of("out"), held.dtype_of("gate")) == ("q5", "q5", "q5")
    assert stored_config(checkpoint, model.draft_layer()).dtype == "float32"


GATE_UPS, DOWNS = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    return make_mxfp4(path, hidden_size=64, intermediate_size=32, num_hidden_layers=2)


def test_pairs_of_mxfp4_are_tensors_of_blocks(pairs: Path) -> None:
    """Of gpt-oss, where each name stands for numbers and scales."""
    checkpoint, floats = Checkpoint(pairs), Checkpoint(pairs.parent / "floats")
    for name in (GATE_UPS, DOWNS):
        blocks = f"{name}_blocks"
        assert checkpoint.dtype(blocks) == block_dtype("MXFP4")
        assert checkpoint.format_name(blocks) == "MXFP4"
        found = to_float32(np.asarray(checkpoint.array(blocks)))
        assert np.array_equal(found, floats.array(name).swapaxes(1, 2))
    dtypes = [checkpoint.loaded_dtype(f"{name}_blocks") for name in (GATE_UPS, DOWNS)]
    assert dtypes == [MXFP4, Q8]  # the second with a row a neuron
    assert checkpoint.own_dtype(f"{DOWNS}_blocks") == MXFP4
    assert has_down_outputs(checkpoint, read_config(pairs))
    config = read_config(pairs)
    assert num_parameters(checkpoint, config) == num_parameters(floats, config)
    facts = facts_of(pairs)
    of_experts = 2 * 5 * 3 * 64 * 32 // 32 * 17
    assert facts["stored_bytes"]["MXFP4"] == of_experts


def shorten(tensors: dict[str, torch.Tensor], *names: str) -> None:
    for name in names:
        tensors[name] = tensors[name][:, :-2].clone()


@pytest.mark.parametrize("dtype", ["", "q8"])
def test_rows_of_such_experts(pairs: Path, dtype: str) -> None:
    """Gate and up rows as stored, or all quantized again; down rows always are."""
    config, checkpoint = read_config(pairs), Checkpoint(pairs)
    size = config.ffn_sizes[0]
    ids = [
        np.sort(np.random.default_rng(n).permutation(size)[:50]).astype(np.int32) for n in (0, 1)
    ]
    rows = [
        load_ffn(Checkpoint(path), config, ids, include_down_bias=True, dtype=kind)
        for path, kind in ((pairs, dtype), (pairs.parent / "floats", ""))
    ]
    for role in ("gate", "up", "down"):
        found, exact = (getattr(one, role) for one in rows)
        kept = role != "down" and not dtype
        assert found.dtype == (MXFP4 if kept else requested_dtype("q8"))
        if kept:
            assert np.array_equal(to_float32(found), exact)
        else:
            assert np.array_equal(found, quantize_rows(exact, Q8))
    assert checkpoint.own_dtype(f"{DOWNS}_blocks") == MXFP4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{DOWNS}_scales"), "_blocks"),
        (lambda t: shorten(t, f"{DOWNS}_scales"), "beside scales"),
        (lambda t: t[f"{DOWNS}_scales"].fill_(255), "has NaN or infinite values"),
        (lambda t: shorten(t, f"{GATE_UPS}_blocks", f"{GATE_UPS}_scales"), "has shape"),
    ],
)
def test_damaged_pairs(
    pairs: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    path = changed(pairs, change, tmp_path)
    with pytest.raises(CheckpointError) as error:
        ffn_of(path, read_model(path))
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1
