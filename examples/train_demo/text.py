"""The text that the demo model is profiled on: half what it has read, half what it is asked.

    python -m examples.train_demo.text OUT.jsonl --tokens 60000
    hotcold profile --text OUT.jsonl

Each line is a document: {"text": ...}, some paragraphs of the running text, or {"messages": ...}, a
question and its answer. Held-out modules are in neither. The same Python gives the same file.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from examples.train_demo.corpus import (
    OTHER_QUESTIONS,
    Question,
    questions,
    running_text,
    stdlib_entries,
)
from hotcold.jobs.cli import main
from hotcold.jobs.support.lazy_group import add_debug_option
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer

NUM_TOKENS = 60_000
_SEED = 2026
_PIECE_CHARS = 1000  # of running text, some 250 tokens
_CANONICAL_SHARE = 0.5  # of the questions, as in training

Document = dict[str, Any]


@click.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(min=1), default=NUM_TOKENS, show_default=True
)
def demo_text(out: Path, num_tokens: int) -> None:
    """Write OUT.jsonl, about so many tokens to profile the demo model on."""
    num_documents, num_written = write_demo_text(out, num_tokens)
    click.echo(f"{out}: {num_documents} documents, {num_written} tokens")


def write_demo_text(out: Path, num_tokens: int = NUM_TOKENS) -> tuple[int, int]:
    """Write the JSON lines; the number of documents and of their tokens in the demo's tokenizer.

    Errors:  UsageError where the corpus has fewer tokens or the file cannot be written
    """
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    if tokenizer is None:
        raise UsageError(f"{DEMO_DIRECTORY} holds no tokenizer.json; take the folder as it came")
    entries = stdlib_entries()
    rng = random.Random(_SEED)
    kinds = (_pieces(running_text(entries), rng), _conversations(questions(entries), rng))
    sized = [((each, _size(each, tokenizer)) for each in documents) for documents in kinds]
    chosen = mixed(sized, num_tokens)
    try:
        out.write_text("".join(json.dumps(document) + "\n" for document, _ in chosen))
    except OSError as problem:
        raise UsageError(f"{out}: cannot be written ({problem.strerror})") from None
    return len(chosen), sum(size for _, size in chosen)


def mixed(
    kinds: Iterable[Iterable[tuple[Document, int]]], num_tokens: int
) -> list[tuple[Document, int]]:
    """Take documents, each with its tokens, until there are `num_tokens`.

    The next is always of the kind that has fewer tokens so far, so every beginning of the result
    holds each kind in about equal parts.
    Errors:  UsageError where a kind ends before that
    """
    waiting = [iter(documents) for documents in kinds]
    taken = [0] * len(waiting)
    chosen = []
    while sum(taken) < num_tokens:
        least = taken.index(min(taken))
        found = next(waiting[least], None)
        if found is None:
            raise UsageError(
                f"--tokens is {num_tokens}; there are only about {sum(taken)}, give no more"
            )
        chosen.append(found)
        taken[least] += found[1]
    return chosen


def _pieces(documents: list[str], rng: random.Random) -> list[Document]:
    """The documents in pieces of whole paragraphs, in random order."""
    found: list[Document] = []
    for document in documents:
        piece: list[str] = []
        for paragraph in document.split("\n\n"):
            piece.append(paragraph)
            if sum(map(len, piece)) >= _PIECE_CHARS:
                found.append({"text": "\n\n".join(piece)})
                piece = []
        if any(piece):
            found.append({"text": "\n\n".join(piece)})
    rng.shuffle(found)
    return found


def _conversations(asked: list[Question], rng: random.Random) -> list[Document]:
    """Each question once, in random order; half of them in the canonical wording."""
    found = []
    for question in rng.sample(asked, len(asked)):
        text = question.canonical
        if rng.random() >= _CANONICAL_SHARE:
            text = rng.choice(OTHER_QUESTIONS).format(name=question.name)
        turns = (("user", text), ("assistant", question.answer))
        found.append({"messages": [{"role": role, "content": said} for role, said in turns]})
    return found


def _size(document: Document, tokenizer: Tokenizer) -> int:
    """Tokens of a document as `read_text_ids` reads it: its eos counts, a bos does not."""
    if "text" in document:
        return len(tokenizer.encode(document["text"], add_special_tokens=False)) + 1
    text = tokenizer.render_chat(document["messages"], add_generation_prompt=False)
    return len(tokenizer.encode(text, add_special_tokens=False)) - 1


if __name__ == "__main__":
    add_debug_option(demo_text)
    sys.exit(main(command=demo_text, program="python -m examples.train_demo.text"))
