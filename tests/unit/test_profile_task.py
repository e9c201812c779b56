"""Which tokens of a text are recorded while it is profiled: evenly spread over it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hotcold.jobs.profile.state import ProfileTask


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 60))
def test_which_inputs_are_recorded(num_tokens: int, num_inputs: int, window: int) -> None:
    num_inputs = min(num_inputs, num_tokens)
    task = ProfileTask("", num_tokens, window, num_inputs)
    found: list[int] = []
    for first in range(0, num_tokens, window):
        assert task.recorded_before(first) == len(found)
        last = min(first + window, num_tokens)
        found += [first + at for at in task.recorded(first, last)]
    assert len(found) == len(set(found)) == num_inputs == task.recorded_before(num_tokens)
    steps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 1
