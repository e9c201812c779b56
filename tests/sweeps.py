"""Which tests of a sweep the default run takes; `pytest -m thorough` takes the others.

A sweep is a test with many parameters, its own or those of its fixtures. Its marker says so, for
one test or as `pytestmark` for all of a file:

    @pytest.mark.sweep                      as few as have each value of each parameter once
    @pytest.mark.sweep(kind=["f32", "q8"])  the same, of those with these values of `kind` alone
    @pytest.mark.sweep(keep=3)              the same, and three of these at most

What is not kept is marked `thorough`. So `@pytest.mark.thorough` itself marks a test, or a
`pytest.param`, that is never in the default run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

Value = tuple[str, int]  # a parameter's name, and the id of one of its values


def mark_sweeps(items: Iterable[pytest.Item]) -> None:
    """Mark as `thorough` what the markers `sweep` leave out of the default run."""
    sweeps: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep"):
            sweeps.setdefault((item.parent, item.originalname), []).append(item)
    for tests in sweeps.values():
        kept = set(_kept(tests))
        for test in tests:
            if test not in kept:
                test.add_marker("thorough")


def _kept(tests: list[pytest.Function]) -> list[pytest.Function]:
    marker = tests[0].get_closest_marker("sweep")
    assert marker is not None
    only = dict(marker.kwargs)
    keep = only.pop("keep", None)
    if not all(hasattr(test, "callspec") for test in tests):
        return tests
    fit = [test for test in tests if _has_values(test, only)]
    if not fit:
        raise pytest.UsageError(f"{tests[0].nodeid}: its sweep keeps no test: {marker.kwargs}")
    cover = _cover(fit)
    if keep is None or len(cover) <= keep:
        return cover
    return [cover[i * len(cover) // keep] for i in range(keep)]


def _has_values(test: pytest.Function, only: dict[str, Iterable[Any]]) -> bool:
    """Whether a test's values are among those; a file's marker may name others' parameters."""
    given = test.callspec.params
    return all(given[name] in values for name, values in only.items() if name in given)


def _cover(tests: list[pytest.Function]) -> list[pytest.Function]:
    """As few of these tests as have every value that one of them has."""
    values: dict[pytest.Function, set[Value]] = {
        test: {(name, id(value)) for name, value in test.callspec.params.items()}
        for test in tests
        if not any(test.iter_markers("thorough"))
    }
    missing: set[Value] = set().union(*values.values())
    chosen = []
    while missing:
        best = max(values, key=lambda test: len(values[test] & missing))
        chosen.append(best)
        missing -= values[best]
    return [test for test in tests if test in chosen]
