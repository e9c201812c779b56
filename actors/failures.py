"""What ends a request, and Ray's errors turned into ours: one line that names the service."""

import ray

from model.errors import HotcoldError, ServiceError


class RequestError(HotcoldError):
    """One request failed; the system goes on with the next. A ServiceError is one that does not."""


def service_error(name: str, error: BaseException) -> HotcoldError:
    """The error to raise when an actor call to `name` ended with `error`.

    What the service itself raised for the user (a bad checkpoint, no memory) comes as it was.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, HotcoldError):
            return cause
        return ServiceError(f"the {name} failed: {first_line(cause)}")
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return ServiceError(f"the {name} was stopped for want of memory; use a smaller model")
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return ServiceError(f"the {name} does not answer: it is stopped or stuck; start again")
    return ServiceError(f"the {name} died ({first_line(error)}); start again")


def first_line(error: object) -> str:
    """The kind of `error` and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
