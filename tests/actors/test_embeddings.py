"""One vector for a prompt: transformers' hidden states, and the same bits in any batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import PromptTooLongError
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import CONTEXT, batching, complete, random_request, start
from tests.conftest import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]


def embedding_of(ids: Any, request_id: str = "") -> GenerateRequest:
    prompt = np.asarray(ids).tolist()
    return GenerateRequest(
        SamplingParams(), prompt_ids=prompt, request_id=request_id, wants_embedding=True
    )


def prompt_of(length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()
    return ids


def expected_mean(checkpoint: TinyCheckpoint) -> np.ndarray:
    """The mean of transformers' hidden states of `ids`, not projected to another width."""

    def compute() -> np.ndarray:
        import torch

        base = checkpoint._model(torch.float32).base_model
        if hasattr(base, "decoder"):
            base.decoder.project_out = None
        with torch.no_grad():
            states = base(torch.tensor(checkpoint.ids)[None]).last_hidden_state[0]
        found: np.ndarray = states.double().mean(0).numpy()
        return found

    return checkpoint._kept("mean state", checkpoint.ids, compute)


@pytest.mark.parametrize(
    "variant",
    ["opt-postnorm", "falcon-bias", "gemma2", "olmo2"],
)
def test_an_embedding_is_the_mean_of_transformers_states(tiny: Tiny, variant: str) -> None:
    checkpoint = tiny(variant)
    with batching(checkpoint, "dense", context=64) as (_, driver):
        result = complete(driver, embedding_of(checkpoint.ids))
    assert (result.ids, result.text, result.finish_reason) == ([], "", "stop")
    assert result.num_prompt_tokens == len(checkpoint.ids)
    found = np.array(result.embedding)
    np.testing.assert_array_equal(found, found.astype(np.float32))
    assert relative_difference(found, expected_mean(checkpoint)) < 1e-5


@pytest.mark.parametrize(("mode", "copying"), [("sign", False), ("exact", True)])
def test_embeddings_have_the_same_bits_in_any_company(tiny: Tiny, mode: str, copying: bool) -> None:
    """Alone, beside other prompts and answers, and with a KV cache that was lost on the way."""
    prompts = [prompt_of(length) for length in (1, 2, 31, 33, 70, 200)]
    options = {"kv_positions": 4 * CONTEXT, "copying": copying}
    with batching(tiny("llama-relu"), mode, **options) as (_, driver):
        alone = [complete(driver, embedding_of(ids)).embedding for ids in prompts]
        assert len({tuple(found or ()) for found in alone}) == len(prompts)
        for turn in range(2):
            running = []
            for number, ids in enumerate(prompts):
                running.append(start(driver, random_request(number)))
                running.append(start(driver, embedding_of(ids, f"embedding {number} in {turn}")))
            for _ in range(10 * turn):
                driver._scheduler.between_steps(driver._scheduler.recompute_all)
                threading.Event().wait(0.001)
            results = [one.end() for one in running]
            assert [result.embedding for result in results[1::2]] == alone
            assert [result.embedding for result in results[::2]] == [None] * len(prompts)


def test_a_prompt_to_embed_may_fill_the_context(tiny: Tiny) -> None:
    with batching(tiny("llama-relu"), context=64) as (_, driver):
        assert complete(driver, embedding_of(prompt_of(64))).embedding is not None
        with pytest.raises(PromptTooLongError, match="has 65 tokens, the context holds 64; "):
            complete(driver, embedding_of(prompt_of(65)))
        assert driver.load().kv_cache_usage == 0


def test_states_that_are_not_finite_are_told(tiny: Tiny) -> None:
    with batching(tiny("llama-relu"), context=64) as (_, driver):
        driver.engine.embedding.last_norm_weight[3] = np.nan
        with pytest.raises(Exception, match="hold a NaN"):
            complete(driver, embedding_of([1, 2]))
        assert complete(driver, random_request(1, 20)).ids
