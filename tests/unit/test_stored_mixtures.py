"""How a mixture larger than memory is laid out on storage, and what of it stays in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.account import Account
from hotcold.actors.setup.storage import storage_within
from hotcold.actors.setup.storage_shares import bytes_in_memory, offloaded_ffn_bytes, token_reads
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.storage import least_in_memory

LAYERS, EXPERTS, SIZE, HIDDEN = 6, 64, 512, 1024
GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """One dense layer, five of experts; no weights are needed."""
    facts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 2000,
        "intermediate_size": 4096,
        "moe_intermediate_size": SIZE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    return read_config(tmp_path)


def test_the_least_is_what_stays_and_one_layer(config: ModelConfig, tmp_path: Path) -> None:
    system = SystemConfig(str(tmp_path))
    least = least_in_memory([layer.ffn for layer in config.layers])
    assert least == 4096 + EXPERTS * SIZE
    need = Account(0, 0, config.num_neurons * 3 * 2 * HIDDEN, 0, 0, 0)
    with pytest.raises(MemoryBudgetError, match="use --cpu-memory"):
        storage_within(None, need, system, config, GIB // 8)
    found = [storage_within(None, need, system, config, size) for size in (GIB, 3 * GIB // 2)]
    kept = [each.num_up_downs for each in found]
    assert least < kept[0] < kept[1] <= config.num_neurons
    for each, size in zip(found, (GIB, 3 * GIB // 2), strict=True):
        assert 0 <= each.num_up_downs - each.num_gates <= 2  # whole neurons
        assert bytes_in_memory(config, each) < size


def test_what_a_token_reads_falls_to_nothing(config: ModelConfig, tmp_path: Path) -> None:
    system = SystemConfig(str(tmp_path))
    counts = [4096 + share * EXPERTS * SIZE * (LAYERS - 1) // 4 for share in range(1, 5)]
    reads = [token_reads(None, system, config, NeuronStorage("", count, count)) for count in counts]
    assert [each.num_bytes for each in reads] == sorted(
        (each.num_bytes for each in reads), reverse=True
    )
    all_chosen = (LAYERS - 1) * 8 * SIZE * 3 * 2 * HIDDEN
    assert 0.05 * all_chosen < reads[1].num_bytes < 0.25 * all_chosen
    assert reads[-1].num_bytes == 0


def test_a_profile_says_what_a_token_reads(config: ModelConfig, tmp_path: Path) -> None:
    """Of each ten choices five are of the expert used last, three of one just in memory."""
    distances = np.zeros(5 * EXPERTS, np.int64)
    distances[[0, 99, 100, 5 * EXPERTS - 1]] = 50, 30, 15, 5
    counts = np.ones((LAYERS, max(config.ffn_sizes)), np.int64)
    chosen = np.ones((LAYERS, EXPERTS), np.int64)
    known = ActivationProfile(counts, 1, "t", "t", chosen, distances)
    system, count = SystemConfig(str(tmp_path)), 100 * SIZE
    kept = NeuronStorage("", 4096 + count, 4096 + count)
    bundle_bytes = BundleGeometry.of(config).bundle_bytes
    of_expert = -(-SIZE // BundleGeometry.of(config).bundle_neurons)
    reads = token_reads(known, system, config, kept)
    assert reads.number == pytest.approx(1.1 * 0.2 * 5 * 8 * of_expert)  # some in vain
    assert reads.num_bytes == pytest.approx(reads.number * bundle_bytes)
    # A GPU has the dense layer, and one expert.
    fitted = replace(system, device="cuda", num_hot_neurons=4096 + SIZE)
    beside = NeuronStorage("", count, count)
    assert token_reads(known, fitted, config, beside).number == pytest.approx(5 / 20 * reads.number)
    unknown = token_reads(None, system, config, kept)
    for none in (None, np.zeros(5 * EXPERTS, np.int64)):
        assert token_reads(replace(known, distances=none), system, config, kept) == unknown


def test_tables_of_neurons_and_biases_are_counted(config: ModelConfig, tmp_path: Path) -> None:
    """Beyond slots: down's biases (L, B, d) float32; ids, biases and norms of each neuron."""
    system, storage = SystemConfig(str(tmp_path)), NeuronStorage("", 0, 0)
    plain = offloaded_ffn_bytes(system, config, storage)
    with_biases = offloaded_ffn_bytes(system, replace(config, ffn_bias=True), storage)
    assert with_biases - plain == 4 * LAYERS * EXPERTS * HIDDEN
    arrays = 2 * 4 + 2 * 4 + 2 + 2 * 4  # without counts, which only a profile makes
    twice = replace(config, experts=replace(config.experts, size=2 * SIZE))  # type: ignore[type-var]
    more = offloaded_ffn_bytes(system, twice, storage) - plain
    assert more > (twice.num_neurons - config.num_neurons) * arrays
