"""Errors that end a request or the system; Ray's errors turned into them, in one line each."""

from collections.abc import Sequence

import ray

from hotcold.cuda_kernels.device import GPU_FAILED
from hotcold.model.errors import HotcoldError, ServiceError

KILLED_FOR_MEMORY = "was killed for want of memory"
_OUT_OF_MEMORY = (
    "MemoryError",
    "OutOfMemory",
    "out of memory",
    "t allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class RequestError(HotcoldError):
    """One request failed; the system serves the next. After a ServiceError it does not."""


class _FromService(HotcoldError):
    def __init__(self, service: int, text: str) -> None:
        """`service` is its index in the buffers."""
        super().__init__(service, text)  # all arguments, or it could not be pickled
        self.service = service
        self.text = text

    @property
    def causes(self) -> dict[int, str]:
        """Why each service failed, without advice."""
        return {self.service: cause_of(self)}

    def __str__(self) -> str:
        return self.text


class AnswerFailed(_FromService, RequestError):
    """A service replied FAILED to this request, and lives on."""


class ServiceLost(_FromService, ServiceError):
    """A service died, is stuck, or runs in another process than the one that was loaded.

    others: those that were found lost in the same wait
    """

    others: "tuple[ServiceLost, ...]" = ()

    @classmethod
    def joined(cls, lost: "Sequence[ServiceLost]") -> "ServiceLost":
        """The first of `lost`, which names the others too."""
        first = lost[0]
        every = {each.service: each for error in lost for each in (error, *error.others)}
        first.others = tuple(each for each in every.values() if each is not first)
        return first

    @property
    def causes(self) -> dict[int, str]:
        """Why each service is lost, without advice."""
        return {each.service: cause_of(each) for each in (self, *self.others)}


class NotLoaded(ServiceError):
    """A service's process is another one than that which was loaded: Ray has restarted it."""


class NotFiniteError(RequestError):
    """Numbers of some sequences are NaN or infinite."""

    def __init__(self, where: str, slots: frozenset[int], service: int | None = None) -> None:
        """`slots`: the sequences; `service`: which made it from finite numbers, or None."""
        super().__init__(where, slots, service)
        self.where = where
        self.slots = slots
        self.service = service

    def __str__(self) -> str:
        return (
            f"the model's numbers are not finite {self.where}: the weights may be damaged, or a "
            "float16 KV cache too narrow for them (--kv-dtype float32)"
        )


class SystemLost(ServiceError):
    """The system has ended; every later call raises this too."""


class CacheLost(ServiceError):
    """A service with attention was replaced: it serves, but its KV cache is empty."""


def cause_of(error: BaseException) -> str:
    """The error's text without the advice to start again."""
    return str(error).removesuffix("; start again")


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text says that memory ran out: Python's, torch's or CUDA's."""
    return any(mark in text for mark in _OUT_OF_MEMORY)


def is_killed_for_memory(text: str) -> bool:
    """Whether an error's text says that the system killed a service for its memory."""
    return KILLED_FOR_MEMORY in text


def is_lost_device(text: str) -> bool:
    """Whether an error's text says that the process can use its GPU no more."""
    return GPU_FAILED in text


def service_error(name: str, error: BaseException) -> HotcoldError:
    """The error to raise when an actor call to `name` ended with `error`.

    A HotcoldError of the service itself (a bad checkpoint, no memory) is returned as it was.
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
