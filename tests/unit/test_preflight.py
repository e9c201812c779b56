"""What is chosen and counted before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.stripes import num_shares
from hotcold.actors.setup.account import account
from hotcold.actors.setup.choose import choose_system, require_one_mode
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.actors.setup.shards import arena_layout, service_specs
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import Predictors, Quality, predictors_path, write_predictors
from tests.tiny_models import make_tiny


def test_a_cache_in_8_bits_is_chosen_and_counted_and_refused_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama-relu", tmp_path, dtype="float16")
    config, options = read_model(path), SystemOptions(kv_dtype="q8")
    system = choose_system(path, config, options)
    dim = config.head_dim
    whole = account(choose_system(path, config, SystemOptions()), config).kv_cache_bytes
    found = account(system, config).kv_cache_bytes
    assert found * 2 * dim == whole * (dim + 4 * -(-dim // 32))
    monkeypatch.setattr("hotcold.actors.setup.choose.choose_device", lambda *_: "cuda")
    with pytest.raises(UsageError, match="--kv-dtype q8 is for the CPU"):
        choose_system(path, config, options)


@pytest.mark.parametrize(("num_threads", "num_services"), [(7, 3), (1, 2)])
def test_no_thread_is_left_over(num_threads: int, num_services: int, tmp_path: Path) -> None:
    config = read_model(make_tiny("llama-relu", tmp_path))
    system = SystemConfig(str(tmp_path), num_threads=num_threads, num_cpu_actors=num_services)
    gpu, *cpus = service_specs(system, config)
    counts = [spec.num_threads for spec in cpus]
    assert sum(counts) == max(num_threads, num_services) and gpu.num_threads == num_threads
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    ids = [spec.neuron_ids[0] for spec in cpus if spec.neuron_ids]
    assert np.sort(np.concatenate(ids)).tolist() == list(range(config.ffn_size))
    for count, shard in zip(counts, ids, strict=True):
        # a share of stripes less or more, where these do not divide evenly
        share = config.ffn_size * count / sum(counts)
        assert abs(shard.size - share) <= config.ffn_size / num_shares(config)


def test_requests_at_once_and_their_cache(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path)
    config = read_model(path)
    plain = choose_system(path, config, SystemOptions(context_length=100))
    assert (plain.max_batch, plain.kv_positions) == (8, 100)
    wide = choose_system(path, config, SystemOptions(context_length=100, max_batch=32))
    more = choose_system(path, config, SystemOptions(context_length=100, kv_positions=1000))
    assert (wide.max_batch, more.kv_positions) == (32, 1000)
    layout = arena_layout(wide, config)
    assert layout.num_slots == layout.max_logits == 32 <= layout.max_tokens
    assert arena_layout(replace(plain, speculate="off"), config).max_logits == 8
    assert arena_layout(replace(plain, speculate="2"), config).max_logits == 8 * (1 + 2)
    assert arena_layout(plain, config).max_logits == 32
    alone = replace(plain, speculate="4", max_batch=1)
    assert arena_layout(alone, config).max_logits == 8
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert account(plain, config).kv_cache_bytes == 128 * token_bytes  # whole pages
    assert account(more, config).kv_cache_bytes == 1024 * token_bytes
    for options, says in (
        (SystemOptions(max_batch=0), "--parallel is 0; give a number from 1 to 32"),
        (SystemOptions(max_batch=33), "--parallel is 33"),
        (SystemOptions(context_length=100, kv_positions=99), "less than the context of 100"),
    ):
        with pytest.raises(UsageError, match=says):
            choose_system(path, config, options)


def test_the_automatic_mode_wants_predictors_that_are_nearly_exact(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "m")
    config = read_model(path)

    def chosen() -> SystemConfig:
        return choose_system(path, config, SystemOptions(mode="auto"))

    assert (chosen().mode, chosen().auto_mode, chosen().predictors_path) == ("exact", True, "")
    layer = LowRankLayer(
        np.zeros((4, config.hidden_size), np.int8),
        np.zeros(4, np.float32),
        np.zeros((4, config.ffn_size), np.int8),
        np.zeros(config.ffn_size, np.float32),
    )
    quality = [Quality(0.99, 0.5, 0.5, 0.2)] * config.num_layers
    layers = [layer] * config.num_layers
    file = predictors_path(path, "lowrank")
    for recall, mode in ((0.95, "exact"), (0.99, "lowrank"), (None, "exact")):
        made = Predictors(layers, "ffn_input", quality, recall)
        write_predictors(file, ModelIdentity.of(path), made)
        assert chosen().mode == mode
        assert chosen().predictors_path == (str(file) if mode == "lowrank" else "")
    with pytest.raises(UsageError, match="a mode is measured"):
        require_one_mode(SystemOptions(mode="auto"))
