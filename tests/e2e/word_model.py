"""A tiny model whose tokens are the words w0, w1 and so on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.tiny_models import VOCAB_SIZE, make_tiny

LONG_CONTEXT = 60_000
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def add_tokenizer(model: Path, opens_with: str | None = None) -> None:
    """Write a tokenizer.json in which word i is token i; texts may open with a word."""
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE - 1)} | {"<unk>": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if opens_with is not None:
        special = [(opens_with, vocab[opens_with])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{opens_with} $A", special_tokens=special
        )
    tokenizer.save(str(model / "tokenizer.json"))


def words_of(ids: Iterable[int]) -> list[str]:
    """What these tokens are."""
    return [f"w{token_id}" if token_id < VOCAB_SIZE - 1 else "<unk>" for token_id in ids]


def add_chat_template(model: Path) -> None:
    """Write a chat template that only joins the messages."""
    (model / "chat_template.jinja").write_text(_TEMPLATE)


def make_word_model(path: Path) -> Path:
    """A model with a chat template that only joins the messages, and room for long answers."""
    model = make_tiny("llama-gqa", path)
    add_tokenizer(model)
    add_chat_template(model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = LONG_CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    return model
