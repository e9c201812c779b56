"""Errors as answers of OpenAI's and Ollama's APIs; what is wrong with a request's fields."""

import logging
from typing import Any

from pydantic import ValidationError

from hotcold.model.errors import (
    HotcoldError,
    PromptError,
    PromptTooLongError,
    ServiceError,
    UsageError,
)

_MAX_NAME_CHARS = 50  # of a field
_TYPE_NAMES = frozenset(("str", "bool", "int", "float", "dict", "list", "constrained-str"))
_MUST_BE = "must be "
_VERBS = ("must ", "may ", "is ")
_SENTENCES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "none_required": "is not supported here; leave it out",
    "model_type": "must be an object",
    "string_too_long": "may have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be a text",
    "too_long": "may hold at most {max_length} items",
    "too_short": "must not be empty",
    "union_tag_invalid": "is of a type that may not be here",
}
_Problem = dict[str, Any]

_LOGGER = logging.getLogger("hotcold.serve")
RETRY_AFTER_S = 5
OLLAMA_PATHS = "/api/"
_MAX_CHARS = 1000  # of a message, which may quote the request


class ApiError(Exception):
    """An HTTP answer of `status` with an error object."""

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
        """`param`: the wrong field; `code`: for programs."""
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
        """The answer's JSON in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def body_for(self, path: str) -> dict[str, Any]:
        """The answer's JSON on `path`; Ollama's routes have another form."""
        return {"error": self.message} if path.startswith(OLLAMA_PATHS) else self.body


def unavailable(message: str, code: str | None = None) -> ApiError:
    """503: the server may answer later."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, "service_unavailable_error", code=code, headers=headers)


TOO_LONG = "context_length_exceeded"  # the code by which agents know it
LOADING_TOOK = "the model was still loading; ask again"


def timed_out(limit_s: float, why: str) -> ApiError:
    """504: the answer took longer than the server allows; `why`, and what helps."""
    return ApiError(
        504,
        f"the answer took longer than {limit_s:g} s: {why}, or have the server started with a "
        "longer --request-timeout",
        "timeout",
    )


def as_api_error(error: BaseException, prompt: str = "prompt") -> ApiError:
    """The answer to any error; a defect is logged, and not described.

    `prompt`: the request's field that holds it.
    """
    match error:
        case ApiError():
            return error
        case ValidationError():
            return refusal(error)
        case PromptTooLongError():
            return ApiError(400, str(error), param=prompt, code=TOO_LONG)
        case PromptError():
            return ApiError(400, str(error), param=prompt)
        case UsageError():
            return ApiError(400, str(error))
        case ServiceError():
            return unavailable(str(error))
        case HotcoldError():
            return ApiError(500, str(error), "server_error")
    _LOGGER.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says how", "server_error")


def refusal(error: ValidationError) -> ApiError:
    """400: the first problem. Of a union, that of the member that the value comes nearest to.

    Several members that are as near are joined: "must be a text or a list".
    """
    problems: list[Any] = error.errors(include_url=False, include_input=False)
    problems = [one for one in problems if one["loc"][:1] == problems[0]["loc"][:1]]
    other_kinds = {one["loc"][:-1] for one in problems if _is_of_another_kind(one)}

    def nearness(problem: _Problem) -> tuple[list[int], bool, bool, int]:
        """How far lists are right, whether the value is of that kind and type; how deep that is."""
        place = problem["loc"]
        has_kind = not any(place[:length] in other_kinds for length in range(len(place)))
        has_type = not problem["type"].endswith(("_type", "literal_error"))
        indices = [part for part in place if isinstance(part, int)]
        if not has_kind:
            has_type = _is_of_another_kind(problem)
        return indices, has_kind, has_type, len(_names(problem))

    nearest = max(problems, key=nearness)  # the first one of those
    names = _names(nearest)
    param = ".".join(str(name)[:_MAX_NAME_CHARS] for name in names) or None
    same = [one for one in problems if nearness(one) == nearness(nearest) and _names(one) == names]
    texts = dict.fromkeys(map(_text, same))
    return ApiError(400, ascii(_sentence(list(texts), param))[1:-1], param=param)


def _is_of_another_kind(problem: _Problem) -> bool:
    """Whether the field `type` says that the value is no such member of a union."""
    return problem["type"] == "literal_error" and problem["loc"][-1:] == ("type",)


def _names(problem: _Problem) -> list[str | int]:
    """The fields and indices of its `loc`."""
    return [part for part in problem["loc"] if not _is_label(part)]


def _is_label(part: str | int) -> bool:
    """Whether a part of a `loc` names a member of a union, and no field or index."""
    if isinstance(part, int):
        return False
    return not part.isidentifier() or part[:1].isupper() or part in _TYPE_NAMES


def _text(problem: _Problem) -> str:
    if not _names(problem) and problem["type"] == "model_type":
        return "the request must be an object"
    known = _SENTENCES.get(problem["type"])
    if known is not None:
        return known.format(**problem.get("ctx", {}))
    text: str = problem["msg"].removeprefix("Value error, ")
    return text


def _sentence(texts: list[str], param: str | None) -> str:
    """One sentence of the problems of one value."""
    text = texts[0]
    if all(one.startswith(_MUST_BE) for one in texts):
        *kinds, last = (one.removeprefix(_MUST_BE) for one in texts)
        text = f"{_MUST_BE}{', '.join(kinds)}{' or ' if kinds else ''}{last}"
    if param is None:
        return text
    return f"{param} {text}" if text.startswith(_VERBS) else f"{param}: {text}"
