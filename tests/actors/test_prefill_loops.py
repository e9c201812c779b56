"""Prompts within compiled loops: the same bits however they are cut.

And a prompt's last layer, of which only the last token's output is wanted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.processes.precompile import _unattached
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.setup.preflight import prepare_system
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.layer_pages import LayerPages
from hotcold.numba_kernels.loops.mailbox import FFN, LAYER, NUM_TOKENS, OPERATION
from tests.actors.in_process import InProcessSystem
from tests.actors.test_in_process import as_on_a_cpu_with
from tests.quantized_models import make_model
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE

IDS = np.random.default_rng(4).integers(0, 101, 128)


def state(
    system: InProcessSystem, mode: str, sizes: list[int], ids: np.ndarray
) -> list[np.ndarray]:
    """Logits of `ids` run in steps of `sizes`, and the cache that they leave."""
    logits = system.logits(mode, ids, sizes)
    attention = system.services[0]
    assert isinstance(attention, AttentionService)
    found = [logits, *(cache.items.copy() for cache in caches(attention))]
    for array in (cache.items for cache in caches(attention)):
        array[:] = 0
    return found


def caches(service: AttentionService) -> tuple[LayerPages, LayerPages]:
    return service.arrays.keys, service.arrays.values


def are_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


LENGTH = 512
CUTS = {
    LENGTH: ([64], [128], [97, MATRIX_TOKENS, 70, 200, 112]),
    MAX_POSITIONS: ([64], [95, 33]),
}
FEATURES: dict[str, tuple[str, ...] | None] = {"this": None, "plain": (), "vnni": ("avx512vnni",)}


# Stored dtype, dtype in memory, the features that products differ by (`matmul_kinds` has the
# table), mode: each format in each mode whose down rows lie otherwise.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("variant", "stored", "weights", "way", "mode"),
    [
        ("llama-gqa", "bfloat16", "", "this", "exact"),
        ("llama-gqa", "bfloat16", "", "this", "dense"),
        ("llama-gqa", "bfloat16", "", "plain", "exact"),
        ("llama-gqa", "bfloat16", "", "vnni", "dense"),
        ("gemma2", "float16", "", "this", "dense"),
        ("opt-postnorm", "float32", "", "this", "exact"),
        ("q-llama-wide", "float16", "q4", "this", "dense"),
        ("q-llama-wide", "float16", "q4", "plain", "exact"),
        ("q-opt", "float16", "q4_1", "this", "exact"),
    ],
)
def test_bits_do_not_depend_on_the_cuts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    stored: str,
    weights: str,
    way: str,
    mode: str,
) -> None:
    features = FEATURES[way]
    if features is not None:
        if not all(map(has_feature, features)):
            pytest.skip(f"this CPU does not have all of {features}")
        as_on_a_cpu_with(monkeypatch, *features)
    path = make_model(variant, tmp_path, stored)
    length = MAX_POSITIONS if "opt" in variant else LENGTH  # learned positions
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, length)
    with InProcessSystem(
        path, 2, 2, num_positions=length, max_tokens=length, weight_dtype=weights
    ) as system:
        whole = state(system, mode, [length], ids)
        assert np.isfinite(whole[0]).all() and whole[1].any()
        for sizes in CUTS[length]:
            assert are_equal(state(system, mode, sizes, ids), whole), sizes


def test_tokens_of_two_sequences_are_refused(tmp_path: Path) -> None:
    path = make_model("q-llama", tmp_path)
    with InProcessSystem(path, 1, 2, num_slots=2, max_tokens=64, weight_dtype="q8") as system:
        engine = system.engine("dense")
        ids = [1] * 40
        with pytest.raises(Exception, match="consecutive positions of one sequence"):
            engine.step(ids, range(40), [0] * 39 + [1])
        logits = engine.step(ids, range(40), [0] * 40).copy()
        assert np.array_equal(logits, engine.step(ids, range(40), [0] * 40))


@pytest.mark.sweep
@pytest.mark.parametrize("num_wanted", [0, 1, 3])
@pytest.mark.parametrize(
    ("variant", "weights"),
    [("q-llama", "q8"), ("q-llama", ""), ("q-falcon-grouped", ""), ("q-opt", "")],
)
def test_the_last_layer_of_the_last_tokens(
    variant: str, weights: str, num_wanted: int, tmp_path: Path
) -> None:
    """Their logits, and all keys and values, are those of a step that computes all."""
    path = make_model(variant, tmp_path)
    ids, num_tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 70).tolist(), 70
    with InProcessSystem(path, 2, 2, max_tokens=128, weight_dtype=weights) as system:
        engine, attention = system.engine("exact"), system.services[0]
        assert isinstance(attention, AttentionService)
        wanted = engine.step(ids, range(num_tokens), [0] * num_tokens, num_wanted).copy()
        items = [cache.items for cache in caches(attention)]
        cache = [array.copy() for array in items]
        for array in (*items, engine.exchange.buffers.hidden):
            array[:] = 0
        engine.place(ids, range(num_tokens), [0] * num_tokens)
        last = system.config.num_layers - 1
        for layer in range(last + 1):
            engine.run_layer(layer, num_tokens, layer + 1, num_wanted)
        requests = engine.exchange.buffers.requests
        asked = requests[1:, [OPERATION, LAYER, NUM_TOKENS]].tolist()
        assert asked == [[FFN, last if num_wanted else last - 1, num_tokens]] * 2
        found = engine.logits(num_tokens, num_wanted)
        assert found.shape == wanted.shape
        assert are_equal([found, *items], [wanted, *cache])


@pytest.mark.sweep
@pytest.mark.parametrize("next_tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_nan_of_a_token_without_an_output_is_noticed(
    kind: str, next_tokens: int, tmp_path: Path
) -> None:
    """Of the last layer, whose attention then does not see the token: by the next that does."""
    path = make_model("q-llama", tmp_path)
    with InProcessSystem(path, 1, 2, num_slots=2, max_tokens=128) as system:
        engine, attention = system.engine("exact"), system.services[0]
        assert isinstance(attention, AttentionService)
        last, config = system.config.num_layers - 1, system.config.layers[-1].attention
        row = config.num_heads * config.head_dim
        row += 0 if kind == "keys" else config.num_kv_heads * config.head_dim
        (weights,) = attention.arrays.qkv.parts(last)
        kept = weights[row].copy()
        weights[row] = np.float16(np.nan).view(np.uint16)
        ids = IDS[:70].tolist()
        engine.place(ids, range(70), [0] * 70)
        for layer in range(last + 1):
            engine.run_layer(layer, 70, layer + 1, 0)
        weights[row] = kept
        with pytest.raises(NotFiniteError, match=f"in layer {last}") as caught:
            engine.step(
                IDS[70 : 70 + next_tokens].tolist(), range(70, 70 + next_tokens), [0] * next_tokens
            )
        assert caught.value.service == 0 and caught.value.slots == {0}


def test_prompts_are_prepared_before_any_request(tmp_path: Path) -> None:
    """As in processes that compile ahead: the loop looks at its mailbox, and ends."""
    path = make_model("q-llama", tmp_path / "model")
    system, _ = prepare_system(path, SystemOptions(weight_dtype="q4", context_length=128))
    service = _unattached(system, lambda topology: topology.cache_services[0])
    assert isinstance(service, AttentionService)
    service.prepare_prompts()
