"""What benchmarks/gguf_quality.py makes of logits, and its table; no model is run."""

from __future__ import annotations

import runpy
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import log_softmax as scipys
from scipy.stats import entropy

PROGRAM = runpy.run_module("benchmarks.gguf_quality")  # benchmarks are not imported
QUESTIONS, greedy, scores, table_of, targets = (
    PROGRAM[name] for name in ("QUESTIONS", "greedy", "scores", "table_of", "targets")
)


def test_scores_are_scipys() -> None:
    rng = np.random.default_rng(0)
    reference, found = (rng.normal(0, 9, (7, 50)).astype(np.float32) for _ in range(2))
    ids = rng.integers(0, 50, 7).tolist()
    report = scores(reference, found, ids)
    own, base = (scipys(logits.astype(np.float64), axis=1) for logits in (found, reference))
    assert report["mean_kld"] == pytest.approx(entropy(np.exp(base), np.exp(own), axis=1).mean())
    assert report["ppl"] == pytest.approx(np.exp(-own[np.arange(7), ids].mean()))
    assert report["same_top"] == (found.argmax(axis=1) == reference.argmax(axis=1)).mean()


def test_targets_follow_what_is_scored() -> None:
    assert targets([[1, 2, 3, 4], [5, 6, 7]], 1) == [3, 4, 7]


def test_greedy_goes_on_from_the_prompt_and_ends_at_a_stop() -> None:
    seen: list[tuple[list[int], int]] = []

    def logits(ids: Sequence[int], first: int) -> np.ndarray:
        seen.append((list(ids), first))
        return np.eye(10)[[(token + 1) % 10 for token in ids]]

    assert greedy(logits, [3, 4], {9}, 100) == [5, 6, 7, 8]
    assert seen == [([3, 4], 0), ([5], 2), ([6], 3), ([7], 4), ([8], 5)]
    assert greedy(logits, [3, 4], set(), 2) == [5, 6]


def test_answers_that_agree_stand_once() -> None:
    score = {"ppl": 20.0, "mean_kld": 0.001, "same_top": 0.99}
    answers = [
        {"question": QUESTIONS[i], "hotcold": "a\nb", "llama.cpp": other}
        for i, other in enumerate(("a\nb", "c"))
    ]
    report = {
        "machine": "m", "date": "d", "tokens": 8, "model": "x.gguf", "answers": answers,
        "scores": {"hotcold": score, "llama.cpp": score | {"ppl": 19.0}},
    }  # fmt: skip
    text = table_of([report])
    assert "| x.gguf | hotcold | 20.000 | +5.26% | 0.00100 | 99.0% |" in text
    assert text.splitlines().count("- both: a b") == 1
    assert "- hotcold: a b\n- llama.cpp: c" in text
