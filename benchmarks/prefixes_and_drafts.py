"""What is saved where prompts begin as earlier ones did, and what drafts gain; the same tokens.

    python -m benchmarks.prefixes_and_drafts [MODEL] [--part conversation --part drafts]

conversation: a long prompt and the question that follows its answer: seconds to the first token
tools: an agent's conversation; each turn sends all of it again, and a tool's result
together: 8 prompts at once that have 1,000 tokens in common: seconds to the last one's first token
restart: the first prompt again, in a new system that finds the file of the one before
drafts: answers of a chat, of code, and of a text to be repeated, with `--speculate` off, `auto` and
    fixed numbers; `--draft q4` and so on choose what drafts

Prefixes are measured with the cache and without (`cache=False`) in one system, drafts in systems of
their own, one after another in each round. Other tokens end the program. Prompts are text where the
model has a tokenizer, else drawn ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.frame import HERE, Json, head, heading, program, progress, spread, table
from hotcold import LLM, SamplingParams
from hotcold.model.config.build import read_config
from hotcold.model.errors import PromptError
from hotcold.model.files.locate import locate_model
from hotcold.placement.machine.survey import usable_cores

_PARTS = ("conversation", "tools", "together", "restart", "drafts")
_ANSWER, _QUESTION, _RESULT = 48, 40, 80  # tokens
_TOGETHER, _COMMON, _OWN = 8, 1000, 20
_TEXT = (
    "The river rises in the hills behind the village and runs past the mill, where it turns an old "
    "wheel. In spring it floods the lower meadows; in summer children build dams of stones in it. "
    "Below the bridge it joins a larger stream, and both go on to the sea."
)
_CODE = "def area(shape):\n    if shape['kind'] == 'square':\n        return shape['side'] ** 2\n"
_ASKED = {
    "chat": "Give me three tips for a good night's sleep.",
    "code": f"Add the kind rectangle to this function, and show all of it:\n\n{_CODE}",
    "repeat": f"Repeat this text word for word:\n\n{_TEXT}",
}
_COLUMNS = ("part", "what", "prompt tokens", "cached", "without, s", "with, s", "ratio")


class Asking:
    """Asks one model; prompts of different `salt` have nothing in common."""

    def __init__(self, llm: LLM, salt: str) -> None:
        self._llm, self._salt = llm, salt

    def ask(self, ids: Sequence[int], cache: bool, num_tokens: int = _ANSWER) -> Json:
        """The answer's tokens, seconds to the first and to the last, tokens that were cached."""
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, cache=cache,
            cache_salt=self._salt,
        )  # fmt: skip
        began, first_s = time.perf_counter(), 0.0
        for piece in self._llm.stream(list(ids), params):
            first_s = first_s or time.perf_counter() - began
            if piece.output is not None:
                ids, cached = piece.output.token_ids, piece.output.num_cached_tokens
        return {"ids": ids, "first": first_s, "all": time.perf_counter() - began, "cached": cached}

    def both(self, ids: Sequence[int]) -> tuple[Json, Json]:
        """Without the cache and with it. Errors: ClickException where tokens differ."""
        return _same(self.ask(ids, cache=False), self.ask(ids, cache=True))


def _same(cold: Json, cached: Json) -> tuple[Json, Json]:
    if cold["ids"] != cached["ids"]:
        raise click.ClickException(f"other tokens: {cold} and {cached}")
    return cold, cached


def text_ids(llm: LLM) -> Iterator[int]:
    """Token ids without end, of this program's words, or drawn for a model without a tokenizer."""
    words, chance = Path(HERE, "README.md").read_text().split(), np.random.default_rng(0)
    while True:
        try:
            text = " ".join(words[n] for n in chance.permutation(len(words)).tolist())
            yield from llm.tokenize(text, add_special_tokens=False)
        except PromptError:
            yield from chance.integers(0, read_config(llm.model_path).vocab_size, 1000).tolist()


def _row(part: str, what: str, size: int, cached: int, cold_s: float, cached_s: float) -> Json:
    return dict(zip(_COLUMNS, (part, what, size, cached, cold_s, cached_s, cached_s / cold_s),
                    strict=True))  # fmt: skip


def prefixes(llm: LLM, wanted: Sequence[str], turns: int, length: int) -> Iterator[Json]:
    """Rows of a running system."""
    ids = text_ids(llm)

    def take(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    Asking(llm, "first").ask(take(200), cache=False)  # what long prompts need is had
    if "conversation" in wanted:
        asking, prompt = Asking(llm, "conversation"), take(length)
        for what in ("first", "second"):
            cold, warm = asking.both(prompt)
            yield _row("conversation", f"{what} turn, to the first token", len(prompt),
                       warm["cached"], cold["first"], warm["first"])  # fmt: skip
            prompt = [*prompt, *cold["ids"], *take(_QUESTION)]
    if "tools" in wanted:
        asking, prompt, sums = Asking(llm, "tools"), take(400), np.zeros(4)
        for _ in range(turns):
            cold, warm = asking.both(prompt)
            sums += len(prompt), warm["cached"], cold["all"], warm["all"]
            prompt = [*prompt, *warm["ids"], *take(_RESULT)]
        yield _row("tools", f"{turns} turns", int(sums[0]), int(sums[1]), *sums[2:].tolist())
    if "together" in wanted:
        common, asking = take(_COMMON), Asking(llm, "together")
        prompts = [[*common, *take(_OWN)] for _ in range(_TOGETHER)]
        with ThreadPoolExecutor(_TOGETHER) as pool:
            cold, warm = (
                list(pool.map(lambda one, cache=cache: asking.ask(one, cache, 1), prompts))
                for cache in (False, True)
            )
        for pair in zip(cold, warm, strict=True):
            _same(*pair)
        last = [max(one["first"] for one in found) for found in (cold, warm)]
        yield _row("together", f"{_TOGETHER} prompts, the last first token",
                   sum(map(len, prompts)), sum(one["cached"] for one in warm), *last)  # fmt: skip


def restart(start: Callable[..., LLM], length: int) -> Json:
    """A prompt's first token in a system that another one has left its file to."""
    with start(prefix_cache="4GiB") as llm:
        prompt = [token for token, _ in zip(text_ids(llm), range(length), strict=False)]
        Asking(llm, "restart").ask(prompt, cache=True)
    with start(prefix_cache="4GiB") as llm:
        asking = Asking(llm, "restart")
        asking.ask(prompt[: length // 2], cache=False, num_tokens=1)
        cold, warm = _same(asking.ask(prompt, cache=False), asking.ask(prompt, cache=True))
    what = "after a restart, to the first token"
    return _row("restart", what, length, warm["cached"], cold["first"], warm["first"])


def drafts(
    start: Callable[..., LLM], ways: Sequence[str], draft: str, tokens: int, rounds: int
) -> Iterator[list[Any]]:
    """Cells by kind of answer and number of drafted tokens; each round's ratio to `off`."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    first: dict[str, tuple[int, ...]] = {}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, cache=False)
    for number in range(rounds):
        for way in ("off", *ways):
            with start(speculate=way, **({} if way == "off" else {"draft": draft})) as llm:
                llm.generate([5, 6, 7], params)
                for kind, text in _ASKED.items():
                    try:
                        answer = llm.chat([{"role": "user", "content": text}], params)
                    except PromptError:  # no chat template
                        answer = llm.generate([token for token, _ in zip(
                            text_ids(llm), range(99), strict=False)], params)  # fmt: skip
                    if first.setdefault(kind, answer.token_ids) != answer.token_ids:
                        raise click.ClickException(f"{kind}, {way}: other tokens than without")
                    counts = answer.work.drafts
                    right = counts.num_accepted / max(1, counts.num_drafted)
                    rate = answer.first.decode_tokens_per_s
                    found.setdefault((kind, way), []).append((rate, right))
        progress(f"drafts, round {number + 1}")
    for (kind, way), runs in found.items():
        ratios = [one[0] / off[0] for one, off in zip(runs, found[kind, "off"], strict=True)]
        rate, right = (median(values) for values in zip(*runs, strict=True))
        yield [kind, way, f"{rate:.2f}", spread(ratios), f"{right:.1%}"]


@program
@click.argument("model", required=False)
@click.option("--part", "parts", type=click.Choice(_PARTS), multiple=True, default=_PARTS)
@click.option("--turns", default=20, help="Of the agent's conversation.")
@click.option("--prompt-tokens", "length", default=2000, help="Of the first prompt.")
@click.option("--context", default=4096, help="Of the system.")
@click.option("--dtype", help="Of the weights, as of `hotcold generate`.")
@click.option("--speculate", "ways", multiple=True, default=["auto", "4"], help="Beside off.")
@click.option("--draft", default="auto", help="As of `hotcold generate`.")
@click.option("--tokens", default=128, help="Of an answer with drafts.")
@click.option("--rounds", default=3, help="Of drafts.")
def main(
    model: str | None, parts: tuple[str, ...], turns: int, length: int, context: int,
    dtype: str | None, ways: tuple[str, ...], draft: str, tokens: int, rounds: int,
) -> tuple[Json, str]:  # fmt: skip
    """Measure the parts."""

    def start(**more: Any) -> LLM:
        room = max(2 * context, _TOGETHER * (_COMMON + _OWN + 512))
        return LLM(model, dtype=dtype, context_length=context, kv_tokens=room, own=True, **more)

    report: Json = head(locate_model(model), len(usable_cores())) | {"rows": [], "drafts": []}
    if {*parts} - {"restart", "drafts"}:
        with start() as llm:
            report["rows"] += prefixes(llm, parts, turns, length)
    if "restart" in parts:
        report["rows"].append(restart(start, length))
    if "drafts" in parts:
        report["drafts"] += drafts(start, ways, draft, tokens, rounds)
    text, lines = heading(report), [list(row.values()) for row in report["rows"]]
    cells = [[*one[:4], *(f"{value:.3f}" for value in one[4:])] for one in lines]
    text += table(_COLUMNS, cells) + "\n" if cells else ""
    columns = ("answer", "drafts", "tokens/s", "ratio (least to most)", "accepted")
    return report, text + (table(columns, report["drafts"]) if report["drafts"] else "")


if __name__ == "__main__":
    main()
