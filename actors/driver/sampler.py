"""How a request's next token is drawn: its options, one after another, applied to its logits.

Biases, penalties and DRY change the logits; a grammar (`grammars`) and what may not end yet
(`active_request`) leave tokens out; then filters or Mirostat draw.
"""

import math
from collections.abc import Sequence

import numpy as np

from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.decode.filters import sample_filtered, sample_mirostat
from hotcold.numba_kernels.decode.repeats import longest_repeats
from hotcold.numba_kernels.decode.sampling import sample

_FEW_TOKENS = 512  # are counted anew for each token
_MAX_BREAKER = 40  # bytes
_MAX_TAIL = 20  # tokens
_LARGEST = float(np.finfo(np.float32).max)

_UNKNOWN, _NO, _YES = range(3)


class TokenSampler:
    """One request's. How many random numbers a token takes follows from the options alone."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        breakers: "Breakers | None" = None,
        never: Sequence[int] = (),
    ) -> None:
        """`breakers`: of DRY, where it is asked for; `never`: tokens that are not chosen."""
        self._params = params
        self._penalties = Penalties(params, len(prompt), never)
        self._dry = Dry(params, breakers, prompt) if breakers is not None else None
        self._random = np.random.default_rng(params.seed)
        self._mu = 2 * params.mirostat_tau
        self._has_xtc = params.xtc_probability > 0 and not params.mirostat
        self._is_filtered = self._has_xtc or params.top_n_sigma > 0 or params.typical_p < 1

    @property
    def state(self) -> tuple[tuple[int, int], float]:
        """State and increment of its random numbers, and Mirostat's mu: what `go_on` takes."""
        pcg = self._random.bit_generator.state["state"]
        return (pcg["state"], pcg["inc"]), self._mu

    def go_on(self, random: tuple[int, int], mu: float) -> None:
        """Draw from now on as a sampler in this state does."""
        generator = self._random.bit_generator
        state, increment = random
        generator.state = {**generator.state, "state": {"state": state, "inc": increment}}
        self._mu = mu

    def processed(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The logits after biases, penalties and DRY: a copy, or the same array unchanged.

        `tokens`: prompt and answer so far.
        Shapes:  logits, out (V,) float32
        """
        found = self._penalties.applied(logits, tokens)
        if self._dry is not None:
            found = found.copy() if found is logits else found
            self._dry.lower(found, tokens)
        return found

    def draw(self, logits: np.ndarray) -> int:
        """The next token, of logits (V,). Errors: ValueError where they hold a NaN."""
        params = self._params
        uniform = float(self._random.random())
        if params.mirostat:
            return self._mirostat(logits, uniform)
        shared = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        if not self._is_filtered:
            return sample(logits, top_k=params.top_k, uniform=uniform, **shared)
        return sample_filtered(
            logits,
            top_k=params.top_k,
            top_n_sigma=params.top_n_sigma,
            typical_p=params.typical_p,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            uniform=uniform,
            chance=float(self._random.random()) if self._has_xtc else 0.0,
            **shared,
        )

    def _mirostat(self, logits: np.ndarray, uniform: float) -> int:
        params = self._params
        token_id, surprise = sample_mirostat(
            logits,
            version=params.mirostat,
            temperature=params.temperature,
            mu=self._mu,
            uniform=uniform,
        )
        self._mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
        return token_id


class _Window:
    """How often each token stands in the last part of a text that only grows."""

    def __init__(self) -> None:
        self._counts = np.empty(0, np.int32)  # by token, of [_first, _end)
        self._first = self._end = 0

    def counts(
        self, tokens: Sequence[int], first: int, vocab_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The different ids of tokens[first:], ascending, and how often each is there.

        `tokens` begin with those of the last call, and `first` is not less than it was then.
        """
        if len(tokens) - first <= _FEW_TOKENS:
            return np.unique(np.asarray(tokens[first:], np.int64), return_counts=True)
        if not len(self._counts):
            self._counts = np.zeros(vocab_size, np.int32)
            self._first = self._end = first
        np.subtract.at(self._counts, np.array(tokens[self._first : first], np.int64), 1)
        np.add.at(self._counts, np.array(tokens[self._end :], np.int64), 1)
        self._first, self._end = first, len(tokens)
        ids = np.flatnonzero(self._counts)
        return ids, self._counts[ids]


class Penalties:
    """One request's logit biases, and penalties of tokens that came before."""

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, never: Sequence[int] = ()
    ) -> None:
        self._never = np.array(never, np.int64)
        self._repeat = np.float32(params.repeat_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._last = params.repeat_last_n
        self._first_counted = 0 if params.penalize_prompt else num_prompt_tokens
        self._repeats = self._last != 0 and self._repeat != 1
        self._counts = self._last != 0 and (self._presence != 0 or self._frequency != 0)
        self._repeated, self._counted = _Window(), _Window()
        self._biased = np.array([token_id for token_id, _ in params.biases], np.int64)
        self._biases = np.array([bias for _, bias in params.biases], np.float32)

    def applied(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The logits changed, in a copy, or the same array where nothing changes.

        Biases are added first, and `never` becomes -inf. Then, for a token among the last
        `repeat_last_n` of `tokens` (prompt and answer), which counts c > 0 times:
            z' = (z / repeat if z > 0 else z * repeat) - c * frequency - presence
        Shapes:  logits, out (V,) float32
        """
        if not (self._biased.size or self._repeats or self._counts or self._never.size):
            return logits
        found = logits.copy()
        found[self._biased] += self._biases
        found[self._never] = -np.inf
        first = 0 if self._last < 0 else max(0, len(tokens) - self._last)
        if self._repeats:
            ids, _ = self._repeated.counts(tokens, first, len(logits))
            old = found[ids]
            found[ids] = np.where(old > 0, old / self._repeat, old * self._repeat)
        if self._counts:
            first = max(first, self._first_counted)
            ids, counts = self._counted.counts(tokens, first, len(logits))
            less = counts.astype(np.float32) * self._frequency
            found[ids] = found[ids] - less - self._presence
        return found


class Breakers:
    """Texts that no sequence goes beyond, and how a model's tokens write them.

    A token writes one that is in its text. So does a token whose text ends with a beginning of one
    with the tokens after it that the tokenizer makes of the rest, the first 20 of them.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, texts: Sequence[str] = ()
    ) -> None:
        """Errors:  UsageError where texts of its own are given to a model without a tokenizer"""
        self._is_alone = np.full(vocab_size, _UNKNOWN, np.int8)  # of tokens met so far
        self._begins: dict[tuple[int, ...], list[tuple[bytes, bytes]]] = {}
        self._texts: list[bytes] = []
        if tokenizer is None:
            if texts and texts != SamplingParams().dry_sequence_breakers:
                raise UsageError(
                    "this model has no tokenizer, so no text; leave out dry_sequence_breakers"
                )
        else:
            self._token_bytes = tokenizer.token_bytes
            self._texts = list(
                dict.fromkeys(text.encode(errors="surrogatepass")[:_MAX_BREAKER] for text in texts)
            )
            self._find_tails(tokenizer)
        # Of what may follow a beginning, the shortest first.
        self._lengths = sorted({0, *map(len, self._begins)})

    def _find_tails(self, tokenizer: Tokenizer) -> None:
        rests: dict[str, list[tuple[bytes, bytes]]] = {}
        for text in self._texts:
            for size in range(1, len(text)):
                if (rest := _decoded(text[size:])) is not None:
                    rests.setdefault(rest, []).append((text[:size], text))
        for begins, ids in zip(
            rests.values(), tokenizer.encode_all(list(rests), False), strict=True
        ):
            self._begins.setdefault(tuple(ids[:_MAX_TAIL]), []).extend(begins)

    def begin(self, tokens: Sequence[int], end: int, first: int) -> int | None:
        """Where the last breaker begins that ends with tokens[end - 1]; None: none from `first` on.

        Looks up one tail for each length that there is, 20 at most.
        """
        for length in self._lengths:
            head = end - 1 - length
            if head < first:
                break
            if self._is_end(tokens[head], tuple(tokens[head + 1 : end])):
                return head
        return None

    def leave_out(self, ids: np.ndarray) -> np.ndarray:
        """Those of `ids`, all met by `begin`, that write no breaker by themselves."""
        return ids[self._is_alone[ids] != _YES]

    def _is_end(self, token_id: int, tail: tuple[int, ...]) -> bool:
        if tail:
            return tail in self._begins and self._writes(token_id, tail)
        if self._is_alone[token_id] == _UNKNOWN:
            self._is_alone[token_id] = _YES if self._writes(token_id, ()) else _NO
        return bool(self._is_alone[token_id] == _YES)

    def _writes(self, token_id: int, tail: tuple[int, ...]) -> bool:
        if not self._texts:
            return False
        written = self._token_bytes(token_id)
        if not tail and any(text in written for text in self._texts):
            return True
        return any(
            written.endswith(begin) and text not in written
            for begin, text in self._begins.get(tail, ())
        )


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


class Dry:
    """One request's DRY penalties."""

    def __init__(self, params: SamplingParams, breakers: Breakers, prompt: Sequence[int]) -> None:
        """Reads the prompt, and compiles what it needs, in the thread that submits the request."""
        self._params = params
        self._breakers = breakers
        self._tokens = np.zeros(2 * len(prompt), np.int32)
        self._count = 0
        self._head, self._since = -1, 0  # the last breaker's first token, and what follows it
        self._read(prompt)
        longest_repeats(self._tokens[:0], 0, 0, 0)

    def lower(self, logits: np.ndarray, tokens: Sequence[int]) -> None:
        """Take the penalties off `logits`; `tokens` are those of the call before, and more.

        Where token v followed an earlier occurrence of the last n tokens, n the most for v and at
        least `dry_allowed_length`, within the last `dry_penalty_last_n` and after the last breaker:
            logits[v] -= dry_multiplier * dry_base ** (n - dry_allowed_length)
        unless v is a breaker by itself; what is taken off is finite.
        Shapes:  logits (V,) float32
        Source:  llama.cpp, which has it from text-generation-webui
        """
        self._read(tokens)
        params = self._params
        allowed, window = params.dry_allowed_length, params.dry_penalty_last_n
        first = 0 if window < 0 else max(0, self._count - window)
        last = self._tokens[first : self._count]
        limit = self._count - self._since if self._head >= first else last.size
        if last.size <= allowed or limit < allowed:
            return
        most = longest_repeats(last, limit, allowed, logits.size)
        ids = self._breakers.leave_out(np.flatnonzero(most >= 0))
        exponents = (most[ids] - allowed).astype(np.float64)
        if (log_base := math.log(params.dry_base)) > 0:
            exponents = np.minimum(exponents, math.log(_LARGEST) // log_base)
        penalties = np.minimum(params.dry_multiplier * params.dry_base**exponents, _LARGEST)
        logits[ids] -= penalties.astype(np.float32)

    def _read(self, tokens: Sequence[int]) -> None:
        """Note the tokens that are new: in an array that grows, and where the last breaker ends."""
        if len(tokens) > self._tokens.size:
            self._tokens = np.resize(self._tokens, 2 * len(tokens))
        self._tokens[self._count : len(tokens)] = tokens[self._count :]
        for end in range(self._count + 1, len(tokens) + 1):
            head = self._breakers.begin(tokens, end, max(self._head, 0))
            if head is not None:
                self._head, self._since = head, end
        self._count = len(tokens)
