"""A GGUF file through hotcold, through llama.cpp, and dequantized to float32 through transformers.

    python -m benchmarks.gguf_quality MODEL.gguf... --out benchmarks/results/gguf-quality

Perplexity on the same token ids, mean KL divergence from the float32 model, how often the likeliest
token is the same; and, for models with a chat template, ten answers side by side. Needs
llama-cpp-python and transformers. The text is documentation that comes with Python.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np

from actors.setup.preflight import read_model
from benchmarks.runs import Json, where_and_when, write_report
from model.text.tokenizer import Tokenizer
from tests.actors.in_process import InProcessSystem

STEP_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "What is two plus three?",
    "Which planet is closest to the sun?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Translate 'good morning' into Spanish.",
    "What is the opposite of hot?",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
)
_SYSTEMS = ("hotcold", "llama.cpp")


@dataclass
class Scores:
    """What one program's logits say of windows of text, position by position, in nats."""

    nll: list[np.ndarray] = field(default_factory=list)
    kld: list[np.ndarray] = field(default_factory=list)
    same_top: list[np.ndarray] = field(default_factory=list)

    def add(self, logits: np.ndarray, ids: np.ndarray, reference: np.ndarray) -> None:
        """One window: logits (T, V), `reference` float32's logprobs (T, V)."""
        found = log_softmax(logits)
        self.nll.append(-found[np.arange(len(ids) - 1), ids[1:]])
        self.kld.append((np.exp(reference) * (reference - found)).sum(axis=1))
        self.same_top.append(found.argmax(axis=1) == reference.argmax(axis=1))

    def report(self) -> Json:
        """perplexity = exp(mean nll); the other figures are means over positions."""
        return {
            "perplexity": float(np.exp(np.concatenate(self.nll).mean())),
            "mean_kld": float(np.concatenate(self.kld).mean()),
            "same_top": float(np.concatenate(self.same_top).mean()),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logprobs (T, V) float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def text_windows(tokenizer: Tokenizer, bos: int | None, count: int, size: int) -> list[np.ndarray]:
    """Ids of the first windows of the text; each begins with bos where texts do."""
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), False)
    opening = [] if bos is None else [bos]
    own = size - len(opening)
    return [np.array(opening + ids[i * own : (i + 1) * own]) for i in range(count)]


class Hotcold:
    """hotcold's services in this process; steps of few tokens, as decoding has."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        self.system = InProcessSystem(
            path, num_threads=threads, kv_dtype="float16", num_positions=context
        )
        self.engine = self.system.engine("dense")

    def logits(self, ids: Sequence[int], first: int = 0) -> np.ndarray:
        """Logits (T, V) of tokens at positions first.., after those given before."""
        parts = []
        for begin in range(0, len(ids), STEP_TOKENS):
            step = [int(token) for token in ids[begin : begin + STEP_TOKENS]]
            places = range(first + begin, first + begin + len(step))
            parts.append(self.engine.step(step, places, [0] * len(step), len(step)).copy())
        return np.concatenate(parts)

    def stop(self) -> None:
        """End its threads."""
        self.system.stop()


class LlamaCpp:
    """llama.cpp in this process, with the bench extra's llama-cpp-python."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        library = importlib.import_module("llama_cpp")
        self.llama = library.Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads,
            logits_all=True, verbose=False,
        )  # fmt: skip

    def logits(self, ids: Sequence[int], first: int = 0) -> np.ndarray:
        """Logits (T, V) of tokens at positions first.., after those given before."""
        if first == 0:
            self.llama.reset()
        self.llama.eval([int(token) for token in ids])
        return np.array(self.llama.scores[first : first + len(ids)])

    def stop(self) -> None:
        """Give up its memory."""
        self.llama.close()


def float32_logits(path: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """The file's tensors dequantized by the gguf package, and run by transformers."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()

    def logits(ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor([list(map(int, ids))])).logits[0].numpy()
        return found

    return logits


def greedy(
    logits: Callable[[Sequence[int], int], np.ndarray], ids: list[int], stops: set[int], most: int
) -> list[int]:
    """The likeliest token, again and again, up to one of `stops`."""
    found: list[int] = []
    token = int(logits(ids, 0)[-1].argmax())
    while token not in stops and len(found) < most:
        found.append(token)
        token = int(logits([token], len(ids) + len(found) - 1)[-1].argmax())
    return found


def measure(path: Path, windows: int, size: int, answer_tokens: int, threads: int) -> Json:
    """One file's figures and answers."""
    config, tokenizer = read_model(path), Tokenizer.from_model(path)
    if tokenizer is None:
        raise click.ClickException(f"{path} has no tokenizer")
    opens = tokenizer.encode("a")[:1] == [config.bos_token_id]
    texts = text_windows(tokenizer, config.bos_token_id if opens else None, windows, size)
    reference = float32_logits(path)
    logprobs = [log_softmax(reference(ids)) for ids in texts]
    own = Scores()
    for ids, expected in zip(texts, logprobs, strict=True):
        own.add(expected, ids, expected)
    found: Json = {"float32": own.report() | {"mean_kld": 0.0, "same_top": 1.0}}
    context = max(size, answer_tokens + 128)
    answers: dict[str, list[str]] = {}
    for name, program in zip(_SYSTEMS, (Hotcold, LlamaCpp), strict=True):
        running, scores = program(path, context, threads), Scores()
        for ids, expected in zip(texts, logprobs, strict=True):
            scores.add(running.logits(ids), ids, expected)
        found[name] = scores.report()
        if tokenizer.has_chat_template and answer_tokens:
            stops = set(config.eos_token_ids)
            answers[name] = [
                tokenizer.decode(greedy(running.logits, prompt, stops, answer_tokens))
                for prompt in _prompts(tokenizer)
            ]
        running.stop()
    return {
        **where_and_when(path, threads),
        "model": path.name,
        "tokens": windows * (size - 1),
        "scores": found,
        "answers": [
            {"question": question} | {name: texts[i] for name, texts in answers.items()}
            for i, question in enumerate(QUESTIONS if answers else ())
        ],
    }


def _prompts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    for question in QUESTIONS:
        text = tokenizer.render_chat([{"role": "user", "content": question}])
        yield tokenizer.encode(text, False)


def table_of(reports: list[Json]) -> str:
    """The figures of all files, then the answers side by side."""
    first = reports[0]
    lines = [
        f"{first['machine']}, {first['date']}; the first {first['tokens']} tokens "
        "of the documentation that comes with Python.",
        "",
        "| model | program | perplexity | to llama.cpp | KL from float32 | likeliest token kept |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        peer = report["scores"]["llama.cpp"]["perplexity"]
        for name, score in report["scores"].items():
            lines.append(
                f"| {report['model']} | {name} | {score['perplexity']:.3f} | "
                f"{score['perplexity'] / peer - 1:+.2%} | {score['mean_kld']:.5f} | "
                f"{score['same_top']:.1%} |"
            )
    for report in reports:
        for answer in report["answers"]:
            lines += ["", f"**{answer['question']}** ({report['model']})", ""]
            same = answer["hotcold"] == answer["llama.cpp"]
            names = ("both",) if same else _SYSTEMS
            for name in names:
                text = answer["hotcold" if name == "both" else name]
                lines.append(f"- {name}: {' '.join(text.split())}")
    return "\n".join(lines)


@click.command()
@click.argument("models", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--windows", default=8, show_default=True)
@click.option("--size", default=256, show_default=True, help="Tokens of a window.")
@click.option("--answer-tokens", default=40, show_default=True, help="0: no answers.")
@click.option("--threads", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
def main(
    models: tuple[Path, ...],
    windows: int,
    size: int,
    answer_tokens: int,
    threads: int,
    out: Path | None,
) -> None:
    """Compare MODELS."""
    reports = [measure(path, windows, size, answer_tokens, threads) for path in models]
    write_report({"models": reports}, table_of(reports), out)


if __name__ == "__main__":
    main()
