"""A GGUF file of random weights has the formats of Q4_K_M, and both readers agree on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.setup.preflight import read_model
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.load.convert import to_float32
from tests.benchmark_programs import error_of, output_of, run_benchmark

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random") / "tiny.gguf"
    output_of(run_benchmark("random_gguf", out, "--shape", "tiny", "--layers", 8))
    assert [path.name for path in out.parent.iterdir()] == ["tiny.gguf"]
    return out


def test_types_are_those_of_q4_k_m(file: Path) -> None:
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(str(file)).tensors}
    matrices = {name: kind for name, kind in types.items() if "norm" not in name}
    six = {name for name, kind in matrices.items() if kind == "Q6_K"}
    # llama.cpp's use_more_bits of eight layers: the first, the last, and every third between.
    more = [
        f"blk.{layer}.{part}.weight" for layer in (0, 3, 6, 7) for part in ("attn_v", "ffn_down")
    ]
    assert six == {"output.weight", *more}
    assert set(matrices.values()) == {"Q4_K", "Q6_K"}


def test_weights_are_spread_around_zero_and_read_alike(file: Path) -> None:
    checkpoint = Checkpoint(file)
    stored = {each.name: each for each in gguf.GGUFReader(str(file)).tensors}
    for theirs, ours in (("attn_q", "self_attn.q_proj"), ("ffn_up", "mlp.up_proj")):
        tensor = stored[f"blk.0.{theirs}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.std(values) == pytest.approx(256**-0.5, rel=0.02)
        assert abs(np.mean(values)) < 0.001
        found = to_float32(np.ascontiguousarray(checkpoint.array(f"layers.0.{ours}.weight")))
        np.testing.assert_allclose(found, values, rtol=1e-6)


def test_it_is_a_model_without_a_tokenizer(file: Path) -> None:
    config = read_model(file)
    assert (config.family, config.num_layers, config.qk_norm) == ("qwen3", 8, "head")
    assert Tokenizer.from_model(file) is None


def test_a_comparison_takes_the_file_as_it_is(file: Path, tmp_path: Path) -> None:
    bench = tmp_path / "llama-bench"
    bench.write_text("#!/bin/sh\n")
    bench.chmod(0o755)
    options = ["--llama-bench", bench, "--threads", 1]
    text = error_of(run_benchmark("vs_llama_cpp", file, *options, "--dtype", "q8"))
    assert "is a GGUF file, compared as it is: leave out --dtype" in text
    text = error_of(run_benchmark("vs_llama_cpp", file, *options, "--mode", "threshold"))
    assert "hotcold profile" in text
