"""A GGUF file through hotcold and through llama.cpp, beside its weights dequantized to float32.

    python -m benchmarks.gguf_quality MODEL.gguf... --out benchmarks/results/gguf-quality

Perplexity on the same token ids, mean KL divergence from the float32 model, how often the likeliest
token is the same; and, for models with a chat template, ten answers side by side. Needs
llama-cpp-python. The text is documentation that comes with Python.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import click
import numpy as np

from benchmarks.quality_models import running, scores, targets, window_logits, write_dequantized
from benchmarks.runs import Json, where_and_when, write_report
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.model.text.tokenizer import Tokenizer
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


def text_windows(path: Path, count: int, size: int) -> list[list[int]]:
    """Ids of the first windows of the text; each begins with bos where a model's texts do.

    Errors:  ClickException for a model without a tokenizer
    """
    tokenizer = _tokenizer(path)
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), False)
    bos = read_model(path).bos_token_id
    opening = [bos] if tokenizer.encode("a")[:1] == [bos] else []
    own = size - len(opening)
    return [opening + ids[i * own : (i + 1) * own] for i in range(count)]


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_model(path)
    if tokenizer is None:
        raise click.ClickException(f"{path} has no tokenizer")
    return tokenizer


class Hotcold:
    """hotcold's services in this process; steps of few tokens, as decoding has."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        options = SystemOptions(mode="dense", context_length=context, num_threads=threads)
        specs = service_specs(*prepare_system(path, options))
        self.system = InProcessSystem(
            path, num_threads=threads, kv_dtype="float16", num_positions=context, specs=specs
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


def float32_logits(path: Path, windows: list[list[int]], threads: int) -> list[np.ndarray]:
    """Logits (V,) of the file's weights as ggml dequantizes them, after all tokens but the last."""
    with tempfile.TemporaryDirectory() as scratch:
        wide = write_dequantized(path, Path(scratch) / "float32", "float32")
        with running(wide, "", max(map(len, windows)), threads) as system:
            found = window_logits(system.engine("dense"), windows, 0)
            return [row.copy() for row in found]


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
    tokenizer, texts = _tokenizer(path), text_windows(path, windows, size)
    reference, wanted = float32_logits(path, texts, threads), targets(texts, 0)
    found: Json = {"float32": scores(reference, reference, wanted)}
    context = max(size, answer_tokens + 128)
    answers: dict[str, list[str]] = {}
    programs: tuple[type[Hotcold | LlamaCpp], ...] = (Hotcold, LlamaCpp)
    for name, program in zip(_SYSTEMS, programs, strict=True):
        running_one = program(path, context, threads)
        rows = (row for ids in texts for row in running_one.logits(ids)[:-1])
        found[name] = scores(reference, rows, wanted)
        if tokenizer.has_chat_template and answer_tokens:
            stops = set(read_model(path).eos_token_ids)
            answers[name] = [
                tokenizer.decode(greedy(running_one.logits, prompt, stops, answer_tokens))
                for prompt in _prompts(tokenizer)
            ]
        running_one.stop()
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
        peer = report["scores"]["llama.cpp"]["ppl"]
        for name, score in report["scores"].items():
            lines.append(
                f"| {report['model']} | {name} | {score['ppl']:.3f} | "
                f"{score['ppl'] / peer - 1:+.2%} | {score['mean_kld']:.5f} | "
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
