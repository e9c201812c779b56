"""Which tokens of a text are recorded while it is profiled: evenly spread over it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.jobs.profile.answers import Answers
from hotcold.jobs.profile.report import expected_misses, print_misses
from hotcold.jobs.profile.state import ProfileTask
from hotcold.jobs.support.offload_plan import OffloadPlan, offload_text
from hotcold.placement.expert_reuse import StackDistances
from hotcold.placement.profile import ActivationProfile


@given(st.integers(1, 10_000), st.integers(1, 600))
def test_answers_fit_in_windows_and_prompts_in_the_text(num_ids: int, window: int) -> None:
    answers = Answers.of(num_ids, window)
    if window == 1:
        assert answers.count == 0
        return
    assert 1 <= answers.count <= 8 and answers.count * answers.num_prompt <= num_ids
    assert 1 <= answers.num_prompt <= 16 and 1 <= answers.num_tokens <= 128
    assert answers.window_ids <= window
    task = ProfileTask("", num_ids, window, num_ids, answers)
    assert task.num_counted == num_ids + answers.count * answers.window_ids
    assert task.recorded(num_ids, task.num_counted) == []  # inputs are the text's alone


@pytest.mark.parametrize(("window", "is_known"), [(9, False), (128, True)])
def test_answers_too_short_to_tell_how_soon_experts_come_again(
    window: int, is_known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says so, and so does a plan, which then expects what other models do."""
    answers, distances = Answers.of(10, window - 1), StackDistances(8)
    for _ in range(answers.count):
        distances.add(np.eye(8, dtype=bool)[np.arange(answers.num_tokens) % 8])
    counts = np.zeros((1, 8), np.int64)
    profile = ActivationProfile(counts, 10, "t", "d", counts, distances.counts)
    misses = expected_misses(profile)
    print_misses(misses)
    said = capsys.readouterr()
    assert bool(misses) == is_known == ("are missing in memory" in said.out)
    assert ("give a longer text or --window" in said.err) != is_known
    assert (profile.known_distances is not None) == is_known
    plan = OffloadPlan(1 << 30, False, True, is_known, 8, 8, 8, 0, 1e6, 1.0, 9.0, 10.0)
    by = "by the profile and" if is_known else "how soon this one's experts are chosen again"
    assert by in offload_text([plan])
