"""The text that the demo model is profiled on: half what it has read, half what it is asked.

    python -m examples.train_demo.text OUT.jsonl --tokens 60000
    hotcold profile --text OUT.jsonl

Each line is a document: {"text": ...}, some paragraphs of the running text, or {"messages": ...}, a
question and its answer. Held-out modules are in neither. The same Python gives the same file.
"""

import json
import random
from typing import Any, TextIO

import click

from examples.train_demo.corpus import Question, questions, running_text, stdlib_entries
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer

_SEED = 2026
_PIECE_CHARS = 1000  # of running text, some 250 tokens

Document = dict[str, Any]


@click.command()
@click.argument("out", type=click.File("w"))
@click.option("--tokens", type=click.IntRange(min=1), default=60_000, show_default=True)
def main(out: TextIO, tokens: int) -> None:
    """Write OUT.jsonl, about so many tokens to profile the demo model on."""
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    entries = stdlib_entries()
    rng = random.Random(_SEED)
    kinds = [_pieces(running_text(entries), rng), _conversations(questions(entries), rng)]
    chosen, sizes = list[Document](), [0, 0]
    while sum(sizes) < tokens:
        least = sizes.index(min(sizes))  # so that every beginning has about as much of each kind
        if not kinds[least]:
            raise click.UsageError(f"there are only about {sum(sizes)} tokens; give no more")
        chosen.append(kinds[least].pop(0))
        sizes[least] += _size(chosen[-1], tokenizer)
    out.write("".join(json.dumps(document) + "\n" for document in chosen))
    click.echo(f"{out.name}: {len(chosen)} documents, {sum(sizes)} tokens")


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
        turns = (("user", question.phrased(rng)), ("assistant", question.answer))
        found.append({"messages": [{"role": role, "content": said} for role, said in turns]})
    return found


def _size(document: Document, tokenizer: Tokenizer) -> int:
    """Tokens of a document as `read_text_ids` reads it: its eos counts, a bos does not."""
    if "text" in document:
        return len(tokenizer.encode(document["text"], add_special_tokens=False)) + 1
    text = tokenizer.render_chat(document["messages"], add_generation_prompt=False)
    return len(tokenizer.encode(text, add_special_tokens=False)) - 1


if __name__ == "__main__":
    main()
