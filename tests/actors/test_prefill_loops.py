"""Prompts within compiled loops: the same bits however they are cut.

And a prompt's last layer, of which only the last token's output is wanted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.processes.precompile import _unattached
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.numba_kernels.layer_pages import LayerPages
from hotcold.numba_kernels.loops.mailbox import FFN, LAYER, NUM_TOKENS, OPERATION
from tests.actors.in_process import InProcessSystem
from tests.quantized_models import make_model
from tests.tiny_models import VOCAB_SIZE
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import file_of, tiny

IDS = np.random.default_rng(4).integers(0, 101, 128)
CUTS = [128], [64], [MATRIX_TOKENS, 95], [50, 40, 38]
GEMMA_LIKE: dict[str, Any] = {"ffn_": "Q4_1", "attn_": "Q8_0", "blk.1.attn_v": "Q6_K"}


def state(system: InProcessSystem, mode: str, sizes: list[int]) -> list[np.ndarray]:
    """Logits of IDS run in steps of `sizes`, and the cache that they leave."""
    logits = system.logits(mode, IDS, sizes)
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


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("kinds", "num_services", "num_threads"), [(MIXED, 2, 2), (GEMMA_LIKE, 1, 1)]
)
def test_a_file_of_quantized_weights(
    kinds: dict[str, str], num_services: int, num_threads: int, tmp_path: Path
) -> None:
    """Attention and FFN, with formats by layers and rows of outputs."""
    path = tmp_path / "tiny.gguf"
    file_of(tiny(), path, {"token_embd": "Q6_K", "output.": "Q6_K", **kinds})
    options = SystemOptions(context_length=128, num_cpu_actors=num_services)
    made, config = prepare_system(path, options)
    specs = service_specs(replace(made, num_threads=num_threads), config)
    with InProcessSystem(path, num_threads=num_threads, specs=specs, max_tokens=128) as system:
        wanted = state(system, "dense", CUTS[0])
        assert np.isfinite(wanted[0]).all() and wanted[1].any()
        for sizes in CUTS[1:]:
            assert are_equal(state(system, "dense", sizes), wanted), sizes
        assert not system.python_answers


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
