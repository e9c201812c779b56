"""POST /completion, as llama.cpp's server answers it.

Source:  llama.cpp, tools/server/README.md
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from typing import Annotated, Any

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import Field, field_validator

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent, TokenLogprob
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, collect
from hotcold.ui.api.backend import Answers
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.logprobs import MIN_LOGPROB, content_tokens
from hotcold.ui.api.requests import completion_requests
from hotcold.ui.api.route import Route
from hotcold.ui.api.schemas import CompletionRequest

Line = dict[str, Any]
_NEVER = -100.0  # added to the logit of a token that must not come
_MAX_TOP = 20
_MAX_GBNF_CHARS = 1 << 13  # whose worst takes 0.1 s: it is quadratic in rules
_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)
# Texts, classes, comments and names of a GBNF; and escapes in the first two. A text or a class that
# is not closed is all that follows, so that nothing is read twice.
_GBNF_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*+"?+|\[(?:\\.|[^\]\\])*+\]?+|#[^\n]*+|[\w-]++', re.DOTALL
)
_ESCAPES = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_NO_SLOT = -1  # requests have none here: any may run beside any


class LlamaCompletion(CompletionRequest):
    """POST /completion. Penalties count the prompt too; `n_predict` below 0 is no limit."""

    n_predict: Annotated[int, Field(ge=-2, lt=1 << 31)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=_MAX_TOP)] | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _as_object(cls, given: Any) -> Any:
        """Pairs as an object; false means never."""
        if not isinstance(given, list):
            return given
        if not all(isinstance(one, list) and len(one) == 2 for one in given):
            raise ValueError("must be an object, or a list of pairs of a token id and a number")
        return {str(one): _NEVER if bias is False else bias for one, bias in given}

    @field_validator("grammar", mode="before")
    @classmethod
    def _or_none(cls, given: Any) -> Any:
        """An empty one is none."""
        return None if given == "" else given

    def drawn(self) -> dict[str, Any]:
        """The values of the fields; seed -1 is any, a penalty of 1 none beside its other name."""
        given = super().drawn()
        seed = None if given["seed"] == -1 else given["seed"]
        if given["repeat_penalty"] is not None and given["repetition_penalty"] == 1:
            given["repetition_penalty"] = None
        return {**given, "seed": seed, "penalize_prompt": True}

    def as_openais(self, most: int) -> "LlamaCompletion":
        """The same with its own fields' values in OpenAI's; `most`: tokens of the longest answer.

        Errors:  ApiError 400
        """
        if self.echo:
            raise ApiError(400, "echo is not supported here; leave it out", param="echo")
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        if self.max_tokens not in (None, wanted):
            told = "n_predict and max_tokens differ; leave one out"
            raise ApiError(400, told, param="max_tokens")
        return self.model_copy(
            update={
                "max_tokens": most if wanted is None or wanted < 0 else wanted,
                "logprobs": self.n_probs or self.logprobs,
                "cache": self.cache if self.cache_prompt is None else self.cache_prompt,
            }
        )

    def in_lark(self) -> "LlamaCompletion":
        """The same with a grammar in llguidance's language. Errors: ApiError 400."""
        if self.grammar is None:
            return self
        return self.model_copy(update={"grammar": _lark(self.grammar)})


def _lark(text: str) -> str:
    """A grammar of llama.cpp, GBNF, in llguidance's language; one of that as it is.

    Errors:  ApiError 400
    """
    if not _GBNF_RULE.search(text):
        return text
    if len(text) > _MAX_GBNF_CHARS:
        told = f"grammar has {len(text)} characters; GBNF may have {_MAX_GBNF_CHARS}, or give Lark"
        raise ApiError(400, told, param="grammar")
    try:
        return str(gbnf_to_lark(_GBNF_PARTS.sub(_for_conversion, text)))
    except Exception as problem:
        told = " ".join(str(problem).split())[:200]
        raise ApiError(400, f"grammar is neither GBNF nor Lark: {told}", param="grammar") from None


def _for_conversion(found: re.Match[str]) -> str:
    """A part of a GBNF without what llguidance converts wrongly: \\u00e9, a rule called start."""
    part = found[0]
    if part[0] in '"[':
        return _ESCAPES.sub(_character, part)
    return "start-of-it" if part == "start" else part


def _character(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or "0", 16)
    if code < 0x80:  # may mean something where it stands; other escapes are 0 here
        return f"\\x{code:02x}" if code else escape[0]
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else escape[0]


class LlamaCompletionRoute(Route):
    """The answers of /completion: an object, or a list of them for several prompts."""

    prompt = "prompt"

    async def whole(self, body: LlamaCompletion) -> Line | list[Line]:
        """The whole answer. Errors: ApiError, HotcoldError."""
        body, started = await self._start(body)
        answers = await collect(started)
        found = await asyncio.to_thread(
            lambda: [
                self._whole(body, index, request, answer)
                for index, (request, answer) in enumerate(
                    zip(started.requests, answers, strict=True)
                )
            ]
        )
        return found[0] if len(found) == 1 else found

    async def stream(self, body: LlamaCompletion) -> sse.EventStream:
        """The answer as events; the last one of each prompt has `stop` true.

        Errors:  ApiError, HotcoldError
        """
        body, started = await self._start(body)
        done = [Answer() for _ in started.requests]

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(started.events()) as events:
                    async for index, event in events:
                        answer, request = done[index], started.requests[index]
                        answer.add(event)
                        if (event.text or event.token_ids) and body.max_tokens:
                            yield sse.event(self._piece(body, index, request, answer, event))
                        if event.result is not None:
                            last = await asyncio.to_thread(
                                self._whole, body, index, request, answer
                            )
                            last.pop("completion_probabilities", None)
                            yield sse.event({**last, "content": "", "tokens": []})
            except Exception as error:
                yield sse.event(as_api_error(error).body)

        return sse.EventStream(pieces(), started.deadline, started.close)

    async def _start(self, given: LlamaCompletion) -> tuple[LlamaCompletion, Answers]:
        body = given.as_openais(self._backend.settings.max_tokens)
        count, backend = len(body.prompts) * (body.n or 1), self._backend
        make = completion_requests
        return body, await backend.start(count, lambda: make(backend, body.in_lark()))

    def _piece(
        self,
        body: LlamaCompletion,
        index: int,
        request: GenerateRequest,
        answer: Answer,
        event: TokenEvent,
    ) -> Line:
        """The object of one event of a stream. `answer`: all until then."""
        return {
            "index": index,
            "content": event.text,
            "tokens": list(event.token_ids),
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": answer.num_tokens,
            "tokens_evaluated": len(request.prompt_ids or ()),
            **self._probabilities(body, content_tokens(event, self._backend.eos_ids)),
        }

    def _whole(
        self, body: LlamaCompletion, index: int, request: GenerateRequest, answer: Answer
    ) -> Line:
        """The object of a finished answer."""
        result = answer.whole
        ids = result.ids if body.max_tokens else []
        text = answer.text if body.max_tokens else ""
        stop_type, word = self._end(result, request.sampling) if ids else ("limit", "")
        tokenizer = self._backend.prompts.tokenizer
        prompt = "" if tokenizer is None else tokenizer.decode(request.prompt_ids or [], False)
        tokens = content_tokens(answer, self._backend.eos_ids) if ids else []
        return {
            "index": index,
            "content": text,
            "tokens": ids if body.return_tokens else [],
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": self._backend.name,
            "tokens_predicted": len(ids),
            "tokens_evaluated": result.num_prompt_tokens,
            "generation_settings": settings(request.sampling),
            "prompt": prompt,
            "has_new_line": "\n" in text,
            "truncated": False,  # what is longer than the context is refused
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": result.num_prompt_tokens + max(0, len(ids) - 1),  # by its end
            "timings": _timings(result, len(ids)),
            **self._probabilities(body, tokens),
        }

    def _end(self, result: Generation, sampling: SamplingParams) -> tuple[str, str]:
        """`stop_type` and `stopping_word` of an answer."""
        if result.finish_reason != "stop":
            return "limit", ""
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._backend.eos_ids)}
        text = b"".join(map(self._texts.bytes_of, result.ids)).decode("utf-8", "replace")
        words = [word for word in sampling.stop if word in text]
        if result.ids[-1] in ends or not words:  # a grammar's end, too
            return "eos", ""
        return "word", min(words, key=text.find)

    def _probabilities(self, body: LlamaCompletion, tokens: list[TokenLogprob]) -> Line:
        if not body.logprobs:
            return {}

        def item(token_id: int, logprob: float | None) -> Line:
            return {
                "id": token_id,
                "token": self._texts.text_of(token_id),
                "bytes": list(self._texts.bytes_of(token_id)),
                "logprob": max(logprob or 0.0, MIN_LOGPROB),
            }

        found = [
            {**item(one.token_id, one.logprob), "top_logprobs": [item(*top) for top in one.top]}
            for one in tokens
        ]
        return {"completion_probabilities": found}


def settings(sampling: SamplingParams) -> Line:
    """Sampling as llama.cpp tells it."""
    found = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    most = found["max_tokens"] or -1
    seed = -1 if sampling.seed is None else sampling.seed
    return {**found, "n_predict": most, "max_tokens": most, "seed": seed}


def _timings(result: Generation, num_new: int) -> Line:
    """Speeds; decoding is counted from the first new token on."""
    num_read = result.num_prompt_tokens - result.num_cached_tokens
    read_ms, new_ms = result.prefill_s * 1e3, result.decode_s * 1e3
    return {
        "cache_n": result.num_cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": read_ms / max(num_read, 1),
        "prompt_per_second": result.prefill_tokens_per_s,
        "predicted_n": num_new,
        "predicted_ms": new_ms,
        "predicted_per_token_ms": new_ms / max(num_new - 1, 1),
        "predicted_per_second": result.decode_tokens_per_s,
    }
