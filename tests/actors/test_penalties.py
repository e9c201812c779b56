"""Tokens that came before become less likely: by the formula, and in whole answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching, complete, random_request, start
from tests.conftest import TinyCheckpoint
from tests.reference import reference_logits

Tiny = Callable[..., TinyCheckpoint]
PENALTIES: list[dict[str, Any]] = [
    {"repeat_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.75, "repeat_last_n": -1},
    {"repeat_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 0.3, "repeat_last_n": 4},
    {"frequency_penalty": 0.75, "repeat_last_n": -1, "penalize_prompt": False},
    {"presence_penalty": 2.0, "repeat_last_n": 6, "penalize_prompt": False},
    {"repeat_penalty": 1.7, "presence_penalty": 0.5, "repeat_last_n": -1, "penalize_prompt": False},
    {"logit_bias": ((3, -100.0), (7, 2.5), (9, 0.75))},
    {"logit_bias": ((5, 3.0), (9, -4.0)), "repeat_penalty": 1.4, "frequency_penalty": 0.5},
]


def expected(
    logits: np.ndarray, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """As llama.cpp has it: each token that stands among the last ones, by how often."""
    last = params.repeat_last_n
    found = logits.astype(np.float64)
    for token, bias in params.biases:
        found[token] += bias
    tokens = [*prompt, *answer]
    for token in set(tokens if last < 0 else tokens[-last:]):
        factor = params.repeat_penalty
        found[token] *= 1 / factor if found[token] > 0 else factor
    tokens = tokens if params.penalize_prompt else [*answer]
    for token, count in Counter(tokens if last < 0 else tokens[-last:]).items():
        found[token] -= count * params.frequency_penalty + params.presence_penalty
    return found


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("penalties", PENALTIES)
def test_whole_answers(tiny: Tiny, penalties: dict[str, Any]) -> None:
    """Greedy, so that each token follows from those before it; the same beside other requests."""
    checkpoint, prompt = tiny("llama-relu"), [5, 9, 5, 5, 17, 9, 40, 3]
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, **penalties)
    request = GenerateRequest(sampling, prompt_ids=prompt, request_id="penalized")
    with batching(checkpoint, "dense") as (_, driver):
        found = complete(driver, request).ids
        plain = complete(driver, replace(request, sampling=replace(
            sampling, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
            logit_bias=(),
        ))).ids  # fmt: skip
        others = [start(driver, random_request(seed)) for seed in range(4)]
        again = start(driver, replace(request, request_id="in a batch")).end()
        assert again.ids == found
        assert not any(isinstance(other.end(), Exception) for other in others)
    for place, token in enumerate(found):
        answer = found[:place]
        logits = reference_logits(checkpoint.path, [*prompt, *answer])[-1]
        weighed = expected(logits, prompt, answer, sampling)
        assert weighed[token] >= weighed.max() - 1e-3
    assert found != plain


def test_where_answers_end(tiny: Tiny) -> None:
    """At tokens that a request names, in the text or not, and nowhere before `min_tokens`."""
    checkpoint, prompt = tiny("llama-relu"), [5, 9, 17, 40, 3]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, repeat_penalty=1.7)

    with batching(checkpoint, "dense") as (_, driver):

        def answer(**changes: Any) -> tuple[list[int], str]:
            sampling = replace(greedy, **changes)
            number = f"{len(names)}"
            names.append(number)
            found = complete(driver, GenerateRequest(
                sampling, prompt_ids=prompt, request_id=number
            ))  # fmt: skip
            return found.ids, found.finish_reason

        names: list[str] = []
        free, reason = answer()
        assert (len(free), reason) == (12, "length") and len(set(free[:6])) == 6
        assert answer(stop_token_ids=(free[4], free[2])) == (free[:3], "stop")
        held, reason = answer(stop_token_ids=(free[2],), min_tokens=6)
        assert held[:2] == free[:2] and free[2] not in held[:6] and len(held) > 6
        forced, _ = answer(logit_bias=((11, 100.0),))
        assert forced[0] == 11 != free[0]
        # The next best stands in where a token may not end the answer.
        logits = reference_logits(checkpoint.path, [*prompt, *free[:2]])[-1]
        weighed = expected(logits, prompt, free[:2], greedy)
        weighed[free[2]] = -np.inf
        assert weighed[held[2]] >= weighed.max() - 1e-3
