"""Random GGUF files of mixtures: formats as llama.cpp's quantizer gives them, routes as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import random_gguf
from benchmarks.ggml_blocks import blocks_of
from hotcold.actors.setup.preflight import read_model
from tests import reference_experts
from tests.reference import reference_logits

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
KINDS = gguf.GGMLQuantizationType
FILES = {
    "qwen3_moe": ("q4_k_m", "qwen3moe"),
    "olmoe": ("q4_0", "olmoe"),
    "mixtral": ("q4_k_m", "llama"),
    "gpt_oss": ("mxfp4", "gpt-oss"),
    "smallthinker": ("q4_0", "smallthinker"),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("random")

    def file(family: str) -> Path:
        if family not in made:
            made[family] = folder / f"{family}.gguf"
            shape = random_gguf.SHAPES[f"tiny-{family}"]
            random_gguf.write(made[family], shape, FILES[family][0])
        return made[family]

    return file


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_hold_their_numbers(kind: str) -> None:
    rows = np.random.default_rng(1).standard_normal((30, 512)).astype(np.float32) * 0.03
    blocks = blocks_of(rows, KINDS[kind])
    assert blocks.dtype == np.uint8 and blocks.shape == (30, blocks.shape[1])
    values = gguf.quants.dequantize(blocks, KINDS[kind])
    bits = {"Q8_0": 8, "Q6_K": 6, "Q5_K": 5}.get(kind, 4)
    assert np.std(values - rows) < 2.2 * 2.0**-bits * rows.std()  # 4 bits: under 14%
    assert abs(values.mean()) < 0.01 * rows.std() + abs(rows.mean())


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 96 numbers are no whole blocks of 256"):
        blocks_of(np.ones((2, 96), np.float32), KINDS.Q4_K)


@pytest.mark.parametrize("family", FILES)
def test_types_are_those_of_such_files(make: Make, family: str) -> None:
    reader = gguf.GGUFReader(str(make(family)))
    architecture = reader.fields["general.architecture"].contents()
    assert architecture == FILES[family][1]
    types = {each.name.split(".", 2)[-1]: each.tensor_type.name for each in reader.tensors}
    file_format = FILES[family][0]
    assert types["ffn_gate_inp.weight"] == "F32"
    experts = {types[f"ffn_{part}_exps.weight"] for part in ("gate", "up")}
    assert experts == {{"q4_k_m": "Q4_K", "q4_0": "Q4_0", "mxfp4": "MXFP4"}[file_format]}
    of_head = next(each.tensor_type.name for each in reader.tensors if each.name == "output.weight")
    assert of_head == ("Q8_0" if file_format == "mxfp4" else "Q6_K")
    downs = [each.tensor_type.name for each in reader.tensors if "down_exps.w" in each.name]
    if file_format == "q4_k_m":
        assert downs == ["Q6_K" if layer in (0, 3, 6, 7) else "Q4_K" for layer in range(8)]
    if family == "mixtral":  # llama.cpp gives models of eight experts more there
        assert [types[f"attn_{part}.weight"] for part in "kv"] == ["Q8_0"] * 2
        assert types["attn_output.weight"] == "Q5_K"
    if family == "gpt_oss":
        assert types["attn_q.weight"] == "Q8_0"
        assert {types[name] for name in ("attn_sinks.weight", "ffn_up_exps.bias")} == {"F32"}


@pytest.mark.parametrize("family", FILES)
def test_it_says_the_shape(make: Make, family: str) -> None:
    config, shape = read_model(make(family)), random_gguf.SHAPES[f"tiny-{family}"]
    assert config.family == family and config.experts is not None
    router = config.experts.router
    assert (router.num_experts, router.num_chosen) == (shape.experts, shape.chosen)
    assert (config.experts.size, config.num_layers) == (shape.ffn, shape.layers)
    scores = {"smallthinker": "sigmoid", "gpt_oss": "softmax_of_chosen"}
    assert router.score == scores.get(family, "softmax")


@pytest.mark.parametrize("family", ["qwen3_moe", "smallthinker", "gpt_oss"])
def test_experts_repeat_and_neurons_fire_as_asked(
    make: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """By the float64 reference, on a text that keeps to a topic for some twenty tokens."""
    chosen, fired = list[torch.Tensor](), list[tuple[float, int]]()
    weights_of, activated = reference_experts.expert_weights, reference_experts.activated

    def weights(*arguments: torch.Tensor) -> torch.Tensor:
        found = weights_of(*arguments)
        chosen.append(found != 0)
        return found

    def active(name: str, x: torch.Tensor, limit: float) -> torch.Tensor:
        fired.append((float((x > 0).sum()), x.numel()))
        return activated(name, x, limit)

    monkeypatch.setattr(reference_experts, "expert_weights", weights)
    monkeypatch.setattr(reference_experts, "activated", active)
    shape, rng, topic, ids = random_gguf.SHAPES[f"tiny-{family}"], np.random.default_rng(3), 0, []
    for _ in range(200):
        topic = int(rng.integers(32)) if rng.random() > 0.95 else topic
        ids.append(topic + 32 * int(rng.integers(shape.vocab // 32)))
    logits = reference_logits(make(family), ids)
    kept = [float((of[1:] & of[:-1]).sum() / of[1:].sum()) for of in chosen]
    assert len(kept) == shape.layers
    assert np.mean(kept) == pytest.approx(shape.kept, abs=0.06)
    busier = [
        float(of.sum(0).sort(descending=True).values[: shape.experts // 2].sum() / of.sum())
        for of in chosen
    ]
    assert np.mean(busier) == pytest.approx(shape.skew, abs=0.06)
    positive, computed = np.sum(fired, axis=0)
    assert positive / computed == pytest.approx(shape.density, rel=0.15)
    stays = logits.argmax(-1) % 32 == np.array(ids) % 32
    assert stays.mean() > 0.75
