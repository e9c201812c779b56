"""Random requests, each drawn from a seed and its number, and from what earlier ones were."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError
from hotcold.model.parameters import Number, Switch, Texts, Whole
from hotcold.model.sampling import PARAMETERS, SamplingParams
from hotcold.model.text.tokenizer import Tokenizer

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_LONGEST_ANSWER = 48
_REMEMBERED = 40  # earlier requests that prompts may begin like
_STOPS = (" the", ".", "\n", "e", "():", "of ")
_SCHEMAS = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": '
    '{"type": "integer"}}, "required": ["name", "n"], "additionalProperties": false}',
    '{"type": "array", "items": {"enum": ["one", "two", "three"]}, "maxItems": 6}',
    '{"type": "boolean"}',
)
_LARKS = ("start: /[a-z]+( [a-z]+)*[.]/", 'start: ("yes" | "no") ", " /[a-z ]{3,40}/')
_CALLS = (
    'start: "<call>" ("search" | "open") "(" args ")"\n'
    'args: %json {"type": "object", "properties": {"q": {"type": "string", "maxLength": 9}}, '
    '"required": ["q"], "additionalProperties": false}'
)
_HANDLED = frozenset(
    ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos",
     "repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n", "penalize_prompt",
     "stop_token_ids", "min_tokens", "include_stop_str_in_output", "logit_bias",
     "repetition_penalty")
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A request, and what happens to it.

    leaves_after: its reader leaves after so many tokens; None: never
    kills: a service is killed meanwhile; restarts: the system is started anew before it
    """

    number: int
    request: GenerateRequest
    leaves_after: int | None = None
    kills: bool = False
    restarts: bool = False


class Draws:
    """Draws requests to one model, in the order of their numbers."""

    def __init__(self, path: Path, seed: int, context: int, harms: bool = True) -> None:
        """`harms`: services are killed and the system is started anew, too."""
        self._seed, self._context, self._harms = seed, context, harms
        self._vocab = read_config(path).vocab_size
        self._tokenizer = Tokenizer.from_model(path)
        self._text: list[int] = []
        if self._tokenizer is not None:
            pages = "".join(file.read_text() for file in sorted(_DOCS.glob("[a-g]*.md")))
            self._text = self._tokenizer.encode(pages[: 1 << 17], False)
        self._earlier: list[tuple[GenerateRequest, list[int]]] = []  # with their answers

    def draw(self, number: int) -> Drawn:
        """The request of that number."""
        chance = random.Random(f"{self._seed} {number}")
        request = self._request(chance, number)
        fate = chance.random()
        leaves = chance.choice((0, 1, 1, 2, 5, 12, 30)) if fate < 0.15 else None
        return Drawn(
            number,
            request,
            leaves,
            kills=self._harms and 0.15 <= fate < 0.17,
            restarts=self._harms and 0.17 <= fate < 0.174,
        )

    def add(self, drawn: Drawn, answer: Sequence[int]) -> None:
        """Remember a request and its answer for later prompts."""
        self._earlier.append((drawn.request, list(answer)))
        del self._earlier[:-_REMEMBERED]

    def _request(self, chance: random.Random, number: int) -> GenerateRequest:
        kind = chance.random()
        name = f"{self._seed}-{number}"
        if self._earlier and kind < 0.1:  # the same again; as `n` has it, with another seed
            same, _ = chance.choice(self._earlier[-8:])
            sampling = same.sampling
            if chance.random() < 0.5:
                sampling = replace(sampling, seed=chance.randrange(1 << 31))
            return replace(same, sampling=sampling, request_id=name)
        prompt = self._prompt(chance)[: self._context - 2]
        room = min(_LONGEST_ANSWER, self._context - len(prompt))
        return GenerateRequest(
            self._sampling(chance, room),
            prompt_ids=prompt,
            request_id=name,
            grammar=self._grammar(chance),
            num_logprobs=chance.choice((None, 0, 1, 5, 20)),
            num_prompt_logprobs=2 if chance.random() < 0.03 else None,
            wants_embedding=chance.random() < 0.02,
            use_cache=chance.random() < 0.95,
            cache_salt=chance.choice(("", "", "", "one", "two")),
        )

    def _prompt(self, chance: random.Random) -> list[int]:
        kind = chance.random()
        if not self._earlier or kind < 0.35:
            return self._new(chance, self._length(chance))
        request, answer = chance.choice(self._earlier)
        earlier = list(request.prompt_ids or [])
        if kind < 0.6:  # it goes on after the answer: a conversation's next turn
            return earlier + answer + self._new(chance, chance.randrange(1, 60))
        if kind < 0.85:  # the same beginning
            cut = chance.randrange(len(earlier) + 1)
            return earlier[:cut] + self._new(chance, chance.randrange(1, 80))
        place = chance.randrange(len(earlier))  # edited
        return earlier[:place] + self._new(chance, 1) + earlier[place + 1 :]

    def _length(self, chance: random.Random) -> int:
        """Mostly short; often just at, before or after a whole page or chunk."""
        if chance.random() < 0.3:
            near = chance.choice((32, 33, 64, 97, 128, 192, 256, 320)) + chance.randrange(-1, 2)
            return min(near, self._context - 2)
        return int(min(self._context - 2, 1 + chance.random() ** 2 * self._context))

    def _new(self, chance: random.Random, length: int) -> list[int]:
        """New tokens: text, or drawn ids; a part that is repeated now and then."""
        if self._text and chance.random() < 0.9:
            first = chance.randrange(max(1, len(self._text) - length))
            found = self._text[first : first + length]
        else:
            found = [chance.randrange(self._vocab) for _ in range(length)]
        if chance.random() < 0.25:
            period = chance.randrange(1, 20)
            found = (found[:period] * (length // period + 1))[:length]
        return found or [chance.randrange(self._vocab)]

    def _sampling(self, chance: random.Random, room: int) -> SamplingParams:
        has_text = self._tokenizer is not None
        most = max(1, min(room, chance.randrange(1, _LONGEST_ANSWER + 1)))
        given: dict[str, Any] = {
            "max_tokens": most,
            "temperature": chance.choice((0.0, chance.uniform(0.0, 1.5), 1.0)),
            "top_k": chance.choice((0, 1, 5, 40)),
            "top_p": chance.choice((1.0, 0.95, 0.5)),
            "min_p": chance.choice((0.0, 0.05, 0.3)),
            "seed": chance.randrange(1 << 31),
            "ignore_eos": chance.random() < 0.5,
        }
        if chance.random() < 0.3:
            given |= {
                "repeat_penalty": chance.choice((1.0, 1.3, 0.8)),
                "presence_penalty": chance.choice((0.0, 1.5)),
                "frequency_penalty": chance.choice((0.0, 0.7)),
                "repeat_last_n": chance.choice((-1, 8, 64)),
                "penalize_prompt": chance.random() < 0.5,
            }
        if chance.random() < 0.2:
            ids = [chance.randrange(self._vocab) for _ in range(5)]
            given["logit_bias"] = [(one, chance.uniform(-8.0, 8.0)) for one in dict.fromkeys(ids)]
        if chance.random() < 0.3:
            stops = chance.sample(_STOPS, chance.randrange(1, 3)) if has_text else []
            given |= {
                "stop": stops,
                "stop_token_ids": [chance.randrange(self._vocab) for _ in range(3)],
                "min_tokens": chance.randrange(most + 1),
                "include_stop_str_in_output": chance.random() < 0.5,
            }
        try:
            return SamplingParams.of_given(given | self._others(chance), SamplingParams())
        except HotcoldError:  # two that do not go together
            return SamplingParams.of_given(given, SamplingParams())

    def _others(self, chance: random.Random) -> dict[str, Any]:
        """Values of parameters that are not named here."""
        found: dict[str, Any] = {}
        for name, one in PARAMETERS.items():
            if name in _HANDLED or chance.random() > 0.1:
                continue
            match one.kind:
                case Number(low, high):
                    found[name] = chance.uniform(low, min(high, low + 2.0))
                case Whole(low, high):
                    found[name] = chance.randint(low, min(high, low + 8))
                case Switch():
                    found[name] = chance.random() < 0.5
                case Texts():
                    found[name] = chance.sample(_STOPS, 2)
        return found

    def _grammar(self, chance: random.Random) -> Grammar | None:
        if self._tokenizer is None or chance.random() > 0.15:
            return None
        return chance.choice(
            (
                Grammar("json_schema", chance.choice(_SCHEMAS)),
                Grammar("lark", chance.choice(_LARKS)),
                Grammar("calls", _CALLS),
            )
        )
