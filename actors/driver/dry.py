"""DRY ("don't repeat yourself"): tokens that would go on with a repetition become less likely."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.decode.repeats import repeat_lengths

_MAX_BREAKER = 40  # bytes
_MAX_TAIL = 20  # tokens
_MAX_KEPT = 64  # breakers that are not looked up again
_LARGEST = float(np.finfo(np.float32).max)

# A token with which a breaker begins, and the tokens that must follow it.
Start = tuple[int, tuple[int, ...]]


class Breakers:
    """Which tokens of a model write the texts that no sequence goes beyond."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._starts = functools.lru_cache(_MAX_KEPT)(self._find_starts)

    def of(self, params: SamplingParams) -> list[Start]:
        """The starts of a request's breakers.

        Errors:  UsageError where breakers of its own are given to a model without a tokenizer
        """
        texts = params.dry_sequence_breakers
        if self._tokenizer is None:
            if texts and texts != SamplingParams().dry_sequence_breakers:
                raise UsageError(
                    "this model has no tokenizer, so no text; leave out dry_sequence_breakers"
                )
            return []
        return [start for text in texts for start in self._starts(text.encode()[:_MAX_BREAKER])]

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        assert self._tokenizer is not None
        return [self._tokenizer.token_bytes(one) for one in range(self._vocab_size)]

    def _find_starts(self, breaker: bytes) -> tuple[Start, ...]:
        """Tokens that hold the text, and those that end with a beginning of it."""
        found: list[Start] = []
        for token_id, text in enumerate(self._texts):
            if breaker in text:
                found.append((token_id, ()))
                continue
            for length in range(1, min(len(breaker), len(text) + 1)):
                if text.endswith(breaker[:length]):
                    found += [(token_id, tail) for tail in self._tails(breaker[length:])]
        return tuple(found)

    @functools.cache  # noqa: B019  # as long as the model
    def _tails(self, rest: bytes) -> tuple[tuple[int, ...], ...]:
        assert self._tokenizer is not None
        try:
            return (tuple(self._tokenizer.encode(rest.decode(), False)[:_MAX_TAIL]),)
        except UnicodeDecodeError:
            return ()


class Dry:
    """One request's DRY penalties."""

    def __init__(self, params: SamplingParams, breakers: Sequence[Start]) -> None:
        """Compiles what it needs, in the thread that submits the request."""
        self._params = params
        self._tails: dict[int, list[tuple[int, ...]]] = {}
        for token_id, tail in breakers:
            self._tails.setdefault(token_id, []).append(tail)
        self._heads = np.array(sorted(self._tails), np.int32)
        self._tokens = np.zeros(0, np.int32)
        self._count = 0
        repeat_lengths(self._tokens)

    def lower(self, logits: np.ndarray, tokens: Sequence[int]) -> None:
        """Take the penalties off `logits`; `tokens` are those of the call before, and more.

        Where token v followed an earlier occurrence of the last n tokens, n the most for v and at
        least `dry_allowed_length`, within the last `dry_penalty_last_n` and after the last breaker:
            logits[v] -= dry_multiplier * dry_base ** (n - dry_allowed_length)
        unless v is a breaker by itself; what is taken off is finite.
        Shapes:  logits (V,) float32
        Source:  llama.cpp, which has it from text-generation-webui
        """
        params, last = self._params, self._last(tokens)
        allowed = params.dry_allowed_length
        limit = self._since_breaker(last)
        if last.size <= allowed or limit < allowed:
            return
        lengths = np.minimum(repeat_lengths(last), limit)
        places = 1 + np.flatnonzero(lengths[1:] >= allowed)
        if not places.size:
            return
        ids, which = np.unique(last[last.size - places], return_inverse=True)
        most = np.zeros(ids.size, np.int64)
        np.maximum.at(most, which, lengths[places])
        exponents = (most - allowed).astype(np.float64)
        if (log_base := math.log(params.dry_base)) > 0:
            exponents = np.minimum(exponents, math.log(_LARGEST) // log_base)
        penalties = np.minimum(params.dry_multiplier * params.dry_base**exponents, _LARGEST)
        may = [() not in self._tails.get(one, ()) for one in ids.tolist()]
        logits[ids[may]] -= penalties[may].astype(np.float32)

    def _last(self, tokens: Sequence[int]) -> np.ndarray:
        """The last tokens that count, out of an array that grows with `tokens`."""
        if len(tokens) > self._tokens.size:
            self._tokens = np.resize(self._tokens, 2 * len(tokens))
        self._tokens[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)
        found, most = self._tokens[: self._count], self._params.dry_penalty_last_n
        return found if most < 0 else found[max(0, found.size - most) :]

    def _since_breaker(self, last: np.ndarray) -> int:
        """How many tokens stand after the last breaker."""
        for place in np.flatnonzero(np.isin(last, self._heads))[::-1].tolist():
            after = tuple(last[place + 1 : place + 1 + _MAX_TAIL].tolist())
            tails = [tail for tail in self._tails[int(last[place])] if tail == after[: len(tail)]]
            if tails:
                return int(last.size - 1 - place - max(map(len, tails)))
        return int(last.size)
