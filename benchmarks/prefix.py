"""What is saved where prompts begin as earlier ones did: in memory, and after a restart.

    python -m benchmarks.prefix [MODEL] [--turns 20] [--parts conversation,tools,together,restart]

conversation: a prompt of 2,000 tokens and the question that follows its answer: seconds to the
    first token of each; with the cache the second reads the new tokens alone
tools: a conversation of 20 turns that an agent has: each sends all of it again, and a result
together: 8 prompts at once that have 1,000 tokens in common
restart: the first question again, in a system that was started anew with its file of beginnings

Each is measured with the cache and without (`cache=False`); the tokens must be the same. Prompts
are token ids, drawn from the words of this file where the model has a tokenizer. Prints a table;
`--json` writes a line for each part. Run it on a machine that does nothing else.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from hotcold import LLM, SamplingParams
from hotcold.model.config.build import read_config
from hotcold.model.errors import PromptError

_PARTS = ("conversation", "tools", "together", "restart")
_ANSWER_TOKENS = 48
_QUESTION_TOKENS = 40
_RESULT_TOKENS = 80  # of a tool, and what the template writes around it
_TOGETHER, _COMMON, _OWN = 8, 1000, 20


@dataclass(frozen=True)
class Asked:
    """One prompt's answer; seconds since it was asked."""

    ids: tuple[int, ...]
    first_s: float
    all_s: float
    num_cached: int


@dataclass(frozen=True)
class Measured:
    """One part, of some prompts: seconds without the cache and with it."""

    part: str
    what: str
    prompt_tokens: int
    cached_tokens: int
    cold_s: float
    cached_s: float

    @property
    def share(self) -> float:
        """Of the time that it took without."""
        return self.cached_s / self.cold_s


class Asking:
    """Asks one model; prompts of different `salt` have nothing in common."""

    def __init__(self, llm: LLM, salt: str) -> None:
        self._llm, self._salt = llm, salt

    def ask(self, ids: Sequence[int], cache: bool, num_tokens: int = _ANSWER_TOKENS) -> Asked:
        """Read an answer of so many tokens as it comes."""
        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            cache=cache,
            cache_salt=self._salt,
        )
        began, first_s = time.perf_counter(), 0.0
        for piece in self._llm.stream(list(ids), params):
            first_s = first_s or time.perf_counter() - began
            if piece.output is not None:
                all_s = time.perf_counter() - began
                found = piece.output.num_cached_tokens
                return Asked(piece.output.token_ids, first_s, all_s, found)
        raise click.ClickException("an answer ended without a result")


def text_ids(llm: LLM) -> Iterator[int]:
    """Token ids without end, of some text; random ones for a model without a tokenizer."""
    vocabulary = read_config(llm.model_path).vocab_size
    random = np.random.default_rng(0)
    try:
        words = Path(__file__).read_text().split()
    except OSError:
        words = ["the", "sea", "and", "a", "ship"]
    while True:
        try:
            order = random.permutation(len(words)).tolist()
            yield from llm.tokenize(" ".join(words[n] for n in order), add_special_tokens=False)
        except PromptError:
            yield from random.integers(0, vocabulary, 1000).tolist()


def _take(ids: Iterator[int], count: int) -> list[int]:
    return [next(ids) for _ in range(count)]


def _same(part: str, *pairs: tuple[Asked, Asked]) -> None:
    for cold, cached in pairs:
        if cold.ids != cached.ids:
            raise click.ClickException(f"{part}: other tokens with the cache: {cold} and {cached}")


def conversation(llm: LLM, ids: Iterator[int], length: int) -> list[Measured]:
    """Two turns; the first is the same with the cache and without."""
    prompt, question = _take(ids, length), _take(ids, _QUESTION_TOKENS)
    asking = Asking(llm, "conversation")
    first_cold = asking.ask(prompt, cache=False)
    second = [*prompt, *first_cold.ids, *question]
    second_cold = asking.ask(second, cache=False)
    first, again = asking.ask(prompt, cache=True), asking.ask(second, cache=True)
    _same("conversation", (first_cold, first), (second_cold, again))
    return [
        Measured("conversation", what, len(asked), found.num_cached, cold.first_s, found.first_s)
        for what, asked, cold, found in (
            ("first turn, to the first token", prompt, first_cold, first),
            ("second turn, to the first token", second, second_cold, again),
        )
    ]


def tools(llm: LLM, ids: Iterator[int], turns: int) -> list[Measured]:
    """All turns of an agent's conversation, in turn without the cache and with it."""
    asking, prompt = Asking(llm, "tools"), _take(ids, 400)
    cold_s = cached_s = 0.0
    num_tokens = num_cached = 0
    for _ in range(turns):
        cold, cached = asking.ask(prompt, cache=False), asking.ask(prompt, cache=True)
        _same("tools", (cold, cached))
        cold_s, cached_s = cold_s + cold.all_s, cached_s + cached.all_s
        num_tokens, num_cached = num_tokens + len(prompt), num_cached + cached.num_cached
        prompt = [*prompt, *cached.ids, *_take(ids, _RESULT_TOKENS)]
    return [Measured("tools", f"{turns} turns", num_tokens, num_cached, cold_s, cached_s)]


def together(llm: LLM, ids: Iterator[int]) -> list[Measured]:
    """Prompts at once that begin alike: seconds until all have their first token."""
    common = _take(ids, _COMMON)
    prompts = [[*common, *_take(ids, _OWN)] for _ in range(_TOGETHER)]
    asking = Asking(llm, "together")
    found: dict[bool, list[Asked]] = {}
    for cache in (False, True):
        with ThreadPoolExecutor(_TOGETHER) as threads:
            ask = _asking_for_one(asking, cache)
            found[cache] = list(threads.map(ask, prompts))
    _same("together", *zip(found[False], found[True], strict=True))
    size = sum(map(len, prompts))
    num_cached = sum(one.num_cached for one in found[True])
    what = f"{_TOGETHER} prompts, the last first token"
    cold_s, cached_s = (max(one.first_s for one in found[cache]) for cache in (False, True))
    middle = f"{_TOGETHER} prompts, the median first token"
    cold_m, cached_m = (
        statistics.median(one.first_s for one in found[cache]) for cache in (False, True)
    )
    return [
        Measured("together", what, size, num_cached, cold_s, cached_s),
        Measured("together", middle, size, num_cached, cold_m, cached_m),
    ]


def _asking_for_one(asking: Asking, cache: bool) -> Callable[[Sequence[int]], Asked]:
    return lambda prompt: asking.ask(prompt, cache, 1)


def restart(start: Callable[..., LLM], length: int, file_bytes: str) -> list[Measured]:
    """A prompt's first token in a system that another one has left its file to."""
    with start(prefix_cache=file_bytes) as llm:
        prompt = _take(text_ids(llm), length)
        Asking(llm, "restart").ask(prompt, cache=True)
    with start(prefix_cache=file_bytes) as llm:
        asking = Asking(llm, "restart")
        asking.ask(
            prompt[: length // 2], cache=False, num_tokens=1
        )  # what long prompts need is had
        cold, cached = asking.ask(prompt, cache=False), asking.ask(prompt, cache=True)
    _same("restart", (cold, cached))
    what = "after a restart, to the first token"
    return [Measured("restart", what, length, cached.num_cached, cold.first_s, cached.first_s)]


def table(found: Sequence[Measured]) -> str:
    """All parts, a line each."""
    lines = [
        "| part | what | prompt tokens | cached | without, s | with, s | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.part} | {one.what} | {one.prompt_tokens} | {one.cached_tokens} | "
        f"{one.cold_s:.3f} | {one.cached_s:.3f} | {one.share:.3f} |"
        for one in found
    ]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--parts", default=",".join(_PARTS), help="Which, with commas between.")
@click.option("--turns", default=20, help="Of the agent's conversation.")
@click.option("--tokens", "length", default=2000, help="Of the conversation's first prompt.")
@click.option("--context", default=4096, help="Of the system.")
@click.option("--dtype", help="Of the weights, as of `hotcold generate`.")
@click.option("--file", "file_bytes", default="4GiB", help="Size of the file for the restart.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each row, too.")
def main(
    model: str | None,
    parts: str,
    turns: int,
    length: int,
    context: int,
    dtype: str | None,
    file_bytes: str,
    as_json: bool,
) -> None:
    """Measure the parts; see the module's text."""
    wanted = parts.split(",")
    if unknown := sorted(set(wanted) - set(_PARTS)):
        raise click.UsageError(f"no part {unknown[0]}; known are {', '.join(_PARTS)}")
    kv_tokens = max(2 * context, _TOGETHER * (_COMMON + _OWN + 512))

    def start(**more: Any) -> LLM:
        options = {"dtype": dtype, "context_length": context, "kv_tokens": kv_tokens, "own": True}
        return LLM(model, **(options | more))

    found: list[Measured] = []
    with start() as llm:
        ids = text_ids(llm)
        Asking(llm, "first").ask(_take(ids, 200), cache=False)  # what long prompts need is had
        if "conversation" in wanted:
            found += conversation(llm, ids, length)
        if "tools" in wanted:
            found += tools(llm, ids, turns)
        if "together" in wanted:
            found += together(llm, ids)
    if "restart" in wanted:
        found += restart(start, length, file_bytes)
    click.echo(table(found))
    for one in found if as_json else ():
        click.echo(json.dumps(asdict(one) | {"ratio": one.share}))


if __name__ == "__main__":
    main()
