"""What is saved where prompts begin as earlier ones did, and what drafts gain; the same tokens.

    python -m benchmarks.prefixes_and_drafts [MODEL] [--part conversation --part drafts]

conversation: a long prompt and the question that follows its answer: seconds to the first token
tools: an agent's conversation; each turn sends all of it again, and a tool's result
together: 8 prompts at once that have 1,000 tokens in common: seconds to the last one's first token
restart: the first prompt again, in a new system that finds the file of the one before
drafts: answers of a chat, of code, and of a text to be repeated, with `--speculate` off, `auto` and
    fixed numbers; `--draft q4` and so on choose what drafts
mtp: the same with drafts by a layer for that, of random weights of Qwen3.5-0.8B's shape, whose
    drafts are all accepted, and nearly all refused; only where it is asked for

Prefixes are measured with the cache and without (`cache=False`) in one system, drafts in systems of
their own, one after another in each round. Other tokens end the program. Prompts are text where the
model has a tokenizer, else drawn ids.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

from benchmarks.frame import HERE, Json, head, heading, program, progress, spread, table
from hotcold import LLM, SamplingParams
from hotcold.model.config.build import read_config
from hotcold.model.errors import PromptError
from hotcold.model.files.locate import locate_model
from hotcold.placement.machine.survey import usable_cores

_PARTS = ("conversation", "tools", "together", "restart", "drafts", "mtp")
_ANSWER, _QUESTION, _RESULT = 48, 40, 80  # tokens
_TOGETHER, _OWN = 8, 20
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
# By temperature: where it is 0, the next token is the id after the last one; else nearly any.
_DRAWN = {"mtp, wrong": 1.0, "mtp, right": 0.0}
_MTP_SHAPE = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3584, "hidden_act": "silu",
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_COLUMNS = ("what", "prompt tokens", "cached", "without, s", "with, s", "ratio")


class Asking:
    """Asks one model; prompts of different `salt` have nothing in common."""

    def __init__(self, llm: LLM, salt: str) -> None:
        self._llm, self._salt = llm, salt

    def ask(self, ids: Sequence[int], cache: bool, num_tokens: int = _ANSWER) -> Json:
        """The answer's tokens, seconds to the first and to the last, tokens that were cached."""
        usual: Json = {"temperature": 0.0, "ignore_eos": True, "cache_salt": self._salt}
        params = SamplingParams(max_tokens=num_tokens, cache=cache, **usual)
        began, first_s = time.perf_counter(), 0.0
        for piece in self._llm.stream(list(ids), params):
            first_s = first_s or time.perf_counter() - began
            if piece.output is not None:
                ids, cached = piece.output.token_ids, piece.output.num_cached_tokens
        return {"ids": ids, "first": first_s, "all": time.perf_counter() - began, "cached": cached}

    def both(self, prompts: list[list[int]], num_tokens: int = _ANSWER) -> list[list[Json]]:
        """All at once without the cache, then with it. Errors: ClickException of other tokens."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            ways = (
                partial(self.ask, cache=cache, num_tokens=num_tokens) for cache in (False, True)
            )
            found = [list(pool.map(way, prompts)) for way in ways]
        if [one["ids"] for one in found[0]] != [one["ids"] for one in found[1]]:
            raise click.ClickException(f"other tokens: {found}")
        return found


def text_ids(llm: LLM) -> Iterator[int]:
    """Token ids without end, of this program's words, or drawn for a model without a tokenizer."""
    words, chance = Path(HERE, "README.md").read_text().split(), np.random.default_rng(0)
    while True:
        try:
            text = " ".join(words[n] for n in chance.permutation(len(words)).tolist())
            yield from llm.tokenize(text, add_special_tokens=False)
        except PromptError:
            yield from chance.integers(0, read_config(llm.model_path).vocab_size, 1000).tolist()


def _row(what: str, key: str, prompts: list[list[int]], found: list[list[Json]]) -> list[Any]:
    """Cells of the prompts of a part: the last one's seconds, or those of all together."""
    cold_s, warm_s = ((sum if key == "all" else max)(one[key] for one in of) for of in found)
    cached = sum(one["cached"] for one in found[1])
    return [what, sum(map(len, prompts)), cached, cold_s, warm_s, warm_s / cold_s]


def prefixes(llm: LLM, wanted: Sequence[str], turns: int, length: int) -> Iterator[list[Any]]:
    """Rows of a running system."""
    ids = text_ids(llm)

    def take(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    Asking(llm, "first").ask(take(min(200, length)), cache=False)  # what long prompts need is had
    if "conversation" in wanted:
        asking, prompt = Asking(llm, "conversation"), take(length)
        for what in ("first", "second"):
            found = asking.both([prompt])
            yield _row(f"{what} turn, to the first token", "first", [prompt], found)
            prompt = [*prompt, *found[0][0]["ids"], *take(_QUESTION)]
    if "tools" in wanted:
        asking, prompts, both = Asking(llm, "tools"), [take(length // 5)], list[list[list[Json]]]()
        for _ in range(turns):
            both.append(asking.both(prompts[-1:]))
            prompts.append([*prompts[-1], *both[-1][0][0]["ids"], *take(_RESULT)])
        sums = [[one[way][0] for one in both] for way in (0, 1)]
        yield _row(f"an agent's {turns} turns", "all", prompts[:-1], sums)
    if "together" in wanted:
        common = take(length // 2)
        prompts = [[*common, *take(_OWN)] for _ in range(_TOGETHER)]
        found = Asking(llm, "together").both(prompts, 1)
        yield _row(f"{_TOGETHER} prompts at once, the last first token", "first", prompts, found)


def restart(start: Callable[..., LLM], length: int) -> list[Any]:
    """A prompt's first token in a system that another one has left its file to."""
    with start(prefix_cache="4GiB") as llm:
        prompt = list(islice(text_ids(llm), length))
        Asking(llm, "restart").ask(prompt, cache=True)
    with start(prefix_cache="4GiB") as llm:
        asking = Asking(llm, "restart")
        asking.ask(prompt[: length // 2], cache=False, num_tokens=1)
        found = asking.both([prompt])
    return _row("after a restart, to the first token", "first", [prompt], found)


def drafts(
    start: Callable[..., LLM], ways: Sequence[str], draft: str, tokens: int, rounds: int,
    temperatures: Mapping[str, float],
) -> Iterator[list[Any]]:  # fmt: skip
    """Cells by kind of answer and number of drafted tokens; each round's ratio to `off`."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    first: dict[str, tuple[int, ...]] = {}
    all_ids: Json = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "cache": False}
    params = {
        kind: SamplingParams(max_tokens=tokens, temperature=temperature, **all_ids)
        for kind, temperature in temperatures.items()
    }
    for number in range(rounds):
        for way in ("off", *ways):
            with start(speculate=way, **({} if way == "off" else {"draft": draft})) as llm:
                llm.generate([5, 6, 7], params[next(iter(params))])
                for kind, drawn in params.items():
                    try:
                        answer = llm.chat([{"role": "user", "content": _ASKED[kind]}], drawn)
                    except (KeyError, PromptError):  # no chat template
                        answer = llm.generate(list(islice(text_ids(llm), 99)), drawn)
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


def write_mtp_model(folder: Path) -> None:
    """A model whose tokens are followed by the next id, and whose layer that drafts knows that.

    Its layers are computed as any, and add nothing: what they end in is zero.
    """
    from safetensors.numpy import load_file, save_file

    from tests.draft_layer_models import DraftedModel  # transformers takes seconds

    DraftedModel("qwen3.5", folder, **_MTP_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    tensors |= {name: np.zeros_like(one) for name, one in tensors.items() if name.endswith(ends)}
    embedding = tensors["model.embed_tokens.weight"]
    width = embedding.shape[1]
    tensors["lm_head.weight"] = np.roll(embedding, 1, axis=0) / embedding.std()
    tensors["mtp.fc.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    tensors["mtp.pre_fc_norm_embedding.weight"] = np.zeros(width, np.float32)
    for name in ("model.norm.weight", "mtp.norm.weight"):  # a logit of 4 at the next id
        tensors[name] = np.full(width, 4 / width - 1, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@program
@click.argument("model", required=False)
@click.option("--part", "parts", type=click.Choice(_PARTS), multiple=True, default=_PARTS[:-1])
@click.option("--turns", default=20, help="Of the agent's conversation.")
@click.option("--prompt-tokens", "length", default=2000, help="Of the first prompt.")
@click.option("--context", default=4096, help="Of the system; a smaller model's is its own.")
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
    path = locate_model(model)
    context = min(context, read_config(path).max_positions)
    length = min(length, context // 2)
    turns = min(turns, (context - length // 5) // (_ANSWER + _RESULT))
    room = max(2 * context, _TOGETHER * (length + _OWN))
    options: Json = {"dtype": dtype, "context_length": context, "kv_tokens": room, "own": True}
    start, rows, drafted = partial(LLM, model, **options), list[list[Any]](), list[list[Any]]()
    if {*parts} - {"restart", "drafts", "mtp"}:
        with start() as llm:
            rows += prefixes(llm, parts, turns, length)
    if "restart" in parts:
        rows.append(restart(start, length))
    if "drafts" in parts:
        drafted += drafts(start, ways, draft, tokens, rounds, dict.fromkeys(_ASKED, 0.0))
    if "mtp" in parts:
        with TemporaryDirectory() as folder:
            write_mtp_model(Path(folder, "model"))
            start = partial(LLM, Path(folder, "model"), **options | {"dtype": dtype or "q8"})
            for one in _DRAWN:  # each in systems of its own, which have learned nothing else
                drafted += drafts(start, ways, "mtp", tokens, rounds, {one: _DRAWN[one]})
    report: Json = head(path, len(usable_cores())) | {"prefixes": rows, "drafts": drafted}
    cells = [[*row[:3], *(f"{value:.3f}" for value in row[3:])] for row in rows]
    text = heading(report) + (table(_COLUMNS, cells) + "\n" if cells else "")
    columns = ("answer", "drafts", "tokens/s", "ratio (least to most)", "accepted")
    return report, text + (table(columns, drafted) if drafted else "")


if __name__ == "__main__":
    main()
