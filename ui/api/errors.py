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
    """400: the first problem. Of a union, that of the nearest member.

    Several nearest members are joined: "must be a text or a list".
    """
    problems: list[Any] = error.errors(include_url=False, include_input=False)
    first, *others = _nearest(problems, 0)
    names = _names(first)
    param = ".".join(str(name)[:_MAX_NAME_CHARS] for name in names) or None
    texts = dict.fromkeys(_text(one) for one in (first, *others) if _names(one) == names)
    return ApiError(400, ascii(_sentence(list(texts), param))[1:-1], param=param)


def _nearest(problems: list[_Problem], depth: int) -> list[_Problem]:
    """The problems to report, of those whose `loc` agree in `depth` parts."""
    place = problems[0]["loc"]
    while depth < len(place) and not _is_label(place[depth]):
        depth += 1
    if depth == len(place):
        return problems[:1]
    members: dict[str, list[_Problem]] = {}
    for problem in problems:
        if problem["loc"][:depth] == place[:depth]:
            members.setdefault(problem["loc"][depth], []).append(problem)
    ranks = [_nearness(of_member, depth + 1) for of_member in members.values()]
    return [
        problem
        for of_member, rank in zip(members.values(), ranks, strict=True)
        if rank == max(ranks)
        for problem in _nearest(of_member, depth + 1)
    ]


def _nearness(problems: list[_Problem], depth: int) -> tuple[Any, ...]:
    """How near a value is to a member of a union: has its type, its kind, is right how far."""
    has_type = has_kind = True
    furthest: tuple[tuple[int, ...], bool] = ((), False)  # and whether the type is right there
    for problem in problems:
        rest = [part for part in problem["loc"][depth:] if not _is_label(part)]
        of_type = not (problem["type"].endswith("_type") or problem["type"] == "literal_error")
        has_type &= bool(rest) or of_type
        has_kind &= rest != ["type"]
        places = tuple(part for part in rest if isinstance(part, int))
        furthest = max(furthest, (places, of_type))
    return has_type, has_kind, furthest


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
