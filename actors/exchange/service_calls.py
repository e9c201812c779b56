"""One call of several services at once: what they answer, or the name of the one that fails."""

from collections.abc import Sequence
from typing import Any

import ray

from actors.protocol.failures import service_error


def call_each(
    names: Sequence[str],
    handles: Sequence[Any],
    method: str,
    *arguments: Any,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a method of all, side by side. See `await_each`; `handles[i]` is of `names[i]`."""
    calls = [getattr(handle, method).remote(*arguments) for handle in handles]
    return await_each(names, calls, timeout_s)


def await_each(
    names: Sequence[str], calls: Sequence[Any], timeout_s: float | None = None
) -> list[Any]:
    """What calls of services return, in order; `calls[i]` is of `names[i]`.

    Errors:  HotcoldError of the first that fails, or of one that is silent for `timeout_s` after
             the last answer
    """
    name_of = dict(zip(calls, names, strict=True))
    waiting, answers = list(calls), {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=timeout_s)
        for call in done or waiting:
            try:
                answers[call] = ray.get(call, timeout=0)
            except ray.exceptions.RayError as error:
                raise service_error(f"{name_of[call]} service", error) from error
    return [answers[call] for call in calls]
