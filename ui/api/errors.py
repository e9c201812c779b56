"""Errors as OpenAI's API tells them, and Ollama's."""

import logging
from typing import Any

from hotcold.model.errors import (
    HotcoldError,
    PromptError,
    PromptTooLongError,
    ServiceError,
    UsageError,
)

_LOGGER = logging.getLogger("hotcold.serve")
RETRY_AFTER_S = 5
OLLAMA_PATHS = "/api/"
_MAX_CHARS = 1000  # of a message: what was asked may be in it


class ApiError(Exception):
    """A request is answered with `status` and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`param` names the field that is wrong, `code` what a program may look for."""
        if len(message) > _MAX_CHARS:
            message = f"{message[:_MAX_CHARS]} …"
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON, as OpenAI's API has it."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def body_for(self, path: str) -> dict[str, Any]:
        """The answer's JSON on `path`: Ollama's clients want a text there."""
        return {"error": self.message} if path.startswith(OLLAMA_PATHS) else self.body


def unavailable(message: str, code: str | None = None) -> ApiError:
    """503: the server cannot answer now, and may later."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, "service_unavailable_error", code=code, headers=headers)


def timed_out(limit_s: float) -> ApiError:
    """504: the answer took longer than the server allows."""
    return ApiError(
        504, f"the answer took longer than {limit_s:g} s; ask for fewer tokens", "timeout"
    )


def as_api_error(error: BaseException) -> ApiError:
    """The answer to whatever went wrong; a defect of ours is logged, and not explained."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
        case PromptError():
            return ApiError(400, str(error), param="prompt")
        case UsageError():
            return ApiError(400, str(error))
        case ServiceError():
            return unavailable(str(error))
        case HotcoldError():
            return ApiError(500, str(error), "server_error")
    _LOGGER.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says how", "server_error")
