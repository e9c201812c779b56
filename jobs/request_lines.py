"""A file of requests, one JSON object a line, read and checked line by line.

{"id": "a", "prompt": "Once upon", "sampling": {"max_tokens": 20, "temperature": 0}}
{"id": "b", "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}]}
{"id": 3, "ids": [1, 17, 42], "cache": false}

With "cache" false a prompt is computed anew, also what earlier ones have begun with. "sampling" has
the keys of model.sampling.PARAMETERS; "json_schema", "regex", "choice" or "grammar", to which the
answer is then held; and "logprobs", which adds each token's and those of so many likeliest ones.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import HotcoldError, UsageError, shown
from hotcold.model.sampling import SamplingParams
from hotcold.sampling_params import SamplingParams as PythonParams

RequestId = str | int
_PROMPTS = ("prompt", "messages", "ids")
_KEYS = ("id", *_PROMPTS, "sampling", "cache")
_OF_REQUESTS = ("json_schema", "regex", "choice", "grammar", "logprobs")  # keys of sampling
_ID_WANTED = "give a text or a whole number"


@dataclass(frozen=True)
class RequestLine:
    """One line's request, or what is wrong with it; `request_id` None where it cannot be read."""

    number: int
    request_id: RequestId | None
    request: GenerateRequest | None = None
    error: str = ""

    def failure(self, problem: object) -> str:
        """One line that says what is wrong with which line."""
        return f"line {self.number}: {' '.join(str(problem).split())}"


def read_requests(file: Path, defaults: SamplingParams) -> Iterator[RequestLine]:
    """Yield a RequestLine for every line of `file` that is not blank.

    Of several lines with the same id the first counts. `defaults` are the sampling of a request
    that says nothing else.
    Errors:  OSError
    """
    seen: set[RequestId] = set()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _checked(line, number, seen, defaults)


def _checked(
    line: bytes, number: int, seen: set[RequestId], defaults: SamplingParams
) -> RequestLine:
    request_id = None
    try:
        values = json_object(line)
        request_id = _request_id(values)
        if request_id in seen:
            raise UsageError(f"the id {shown(request_id)} was used by a line above")
        seen.add(request_id)
        return RequestLine(number, request_id, _request(values, defaults))
    except HotcoldError as problem:
        return RequestLine(number, request_id, error=str(problem))


def json_object(line: bytes) -> dict[str, Any]:
    """The object of a line. Errors: UsageError."""
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"not JSON in UTF-8 ({problem})") from None
    if not isinstance(values, dict):
        raise UsageError('not a JSON object; write it like {"id": 1, "prompt": "Hello"}')
    return values


def _request_id(values: dict[str, Any]) -> RequestId:
    if "id" not in values:
        raise UsageError(f"there is no id; {_ID_WANTED}")
    request_id = values["id"]
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        raise UsageError(f"the id is {shown(request_id)}; {_ID_WANTED}")
    return request_id


def _request(values: dict[str, Any], defaults: SamplingParams) -> GenerateRequest:
    if unknown := sorted(set(values) - set(_KEYS)):
        raise UsageError(f"unknown key {shown(unknown[0])}; known are {', '.join(_KEYS)}")
    given = [name for name in _PROMPTS if values.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise UsageError(f"give one of {', '.join(_PROMPTS)}; found {found}")
    sampling = values.get("sampling")
    if not isinstance(sampling, dict | None):
        raise UsageError(f"sampling is {shown(sampling)}; give an object of options")
    cache = values.get("cache")
    if not isinstance(cache, bool | None):
        raise UsageError(f"cache is {shown(cache)}; give true or false")
    params, options = _drawn(sampling or {}, defaults)
    options["use_cache"] = cache is not False
    match given[0], values[given[0]]:
        case "prompt", str() as text:
            return GenerateRequest(params, prompt=text, **options)
        case "messages", list() as messages if all(map(_is_message, messages)):
            return GenerateRequest(params, messages=messages, **options)
        case "ids", list() as ids if all(type(token_id) is int for token_id in ids):
            return GenerateRequest(params, prompt_ids=ids, **options)
        case "prompt", value:
            raise UsageError(f"prompt is {shown(value)}; give a text")
        case "messages", value:
            raise UsageError(
                f"messages is {shown(value)}; give a list of objects with a role and a content"
            )
        case _, value:
            raise UsageError(f"ids is {shown(value)}; give a list of token ids")


def _drawn(
    sampling: dict[str, Any], defaults: SamplingParams
) -> tuple[SamplingParams, dict[str, Any]]:
    """What a line's `sampling` says, and further fields of its request. Errors: UsageError."""
    if sampling.get("n") not in (None, 1):
        raise UsageError(
            f"n is {shown(sampling['n'])}; a line has one answer: give several, with other seeds"
        )
    drawn = {key: one for key, one in sampling.items() if key not in (*_OF_REQUESTS, "n")}
    asked = PythonParams(**{key: sampling[key] for key in _OF_REQUESTS if key in sampling})
    options = {"grammar": asked.shape(), "num_logprobs": asked.logprobs}
    return SamplingParams.of_given(drawn, defaults), options


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )
