"""What ends a request, and Ray's errors turned into ours: one line that names the service."""

import ray

from hotcold.cuda_kernels.device import GPU_FAILED
from hotcold.model.errors import HotcoldError, ServiceError

KILLED_FOR_MEMORY = "was killed for want of memory"
_WANT_OF_MEMORY = (
    "MemoryError",
    "OutOfMemory",
    "out of memory",
    "t allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class RequestError(HotcoldError):
    """One request failed; the system goes on with the next. A ServiceError is one that does not."""


class AnswerFailed(RequestError):
    """A service answered FAILED to this request, and lives on."""

    def __init__(self, service: int, text: str) -> None:
        """`service` is its index in the buffers."""
        super().__init__(service, text)  # all arguments, or it could not be pickled
        self.service = service
        self.text = text

    def __str__(self) -> str:
        return self.text


class NotFiniteError(RequestError):
    """Numbers of some sequences are NaN or infinite."""

    def __init__(self, where: str, slots: frozenset[int], service: int | None = None) -> None:
        """`slots`: the sequences; `service` made it of finite numbers, None where no one did."""
        super().__init__(where, slots, service)
        self.where = where
        self.slots = slots
        self.service = service

    def __str__(self) -> str:
        return (
            f"the model's numbers are not finite {self.where}: the weights may be damaged, or a "
            "float16 KV cache too narrow for them (--kv-dtype float32)"
        )


class ServiceLost(ServiceError):
    """A service died, is stuck, or is another process than the one that was loaded."""

    def __init__(self, service: int, text: str) -> None:
        """`service` is its index in the buffers."""
        super().__init__(service, text)
        self.service = service
        self.text = text

    def __str__(self) -> str:
        return self.text


class SystemLost(ServiceError):
    """Nothing can be computed any more; all who ask are told why."""


class CacheLost(ServiceError):
    """The GPU service was replaced: it serves, but the KV cache is empty."""


def cause_of(error: BaseException) -> str:
    """What happened, without the advice to start again: that is what is being done."""
    return str(error).removesuffix("; start again")


def is_want_of_memory(text: str) -> bool:
    """Whether an error's text tells that memory could not be had: Python's, torch's, CUDA's."""
    return any(mark in text for mark in _WANT_OF_MEMORY)


def is_killed_for_memory(text: str) -> bool:
    """Whether a service's end is told to be the system's way of getting memory."""
    return KILLED_FOR_MEMORY in text


def is_lost_device(text: str) -> bool:
    """Whether an error's text tells that the process's GPU is of no use to it any more."""
    return GPU_FAILED in text


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
        return ServiceError(f"the {name} {KILLED_FOR_MEMORY}; start again")
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return ServiceError(f"the {name} does not answer: it is stopped or stuck; start again")
    return ServiceError(f"the {name} died ({first_line(error)}); start again")


def first_line(error: object) -> str:
    """The kind of `error` and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
