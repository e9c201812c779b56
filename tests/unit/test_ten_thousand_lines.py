"""Token ids of 10,000 lines of mixed text: SentencePiece's own, and those of tokenizer.json."""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hotcold.model.text.tokenizer import Tokenizer
from tests.unit.test_gguf_tokenizer import draft, written

NUM_LINES = 10_000
_ALPHABETS = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x530), (0x590, 0x600),
              (0x900, 0x980), (0x3040, 0x3100), (0x4E00, 0x5200), (0xAC00, 0xB000),
              (0x1F300, 0x1F650), (0x2000, 0x2070), (0x300, 0x370))  # fmt: skip


def documentation() -> list[str]:
    """Prose: the language's reference, as `help()` shows it."""
    return "\n".join(pydoc_data.topics.topics.values()).split("\n")


def sources() -> list[str]:
    """Code with its spaces: modules that every Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "typing.py", "decimal.py", "_pydecimal.py", "datetime.py", "inspect.py")
    texts = [(folder / name).read_text() for name in names if (folder / name).exists()]
    return "\n".join(texts).split("\n")


def made_up(number: int) -> list[str]:
    """Runs of spaces, numbers, and words of many alphabets, drawn by a fixed seed."""
    draw = random.Random(8)
    found = []
    for _ in range(number):
        parts = []
        for _ in range(draw.randrange(1, 9)):
            low, high = draw.choice(_ALPHABETS)
            word = "".join(chr(draw.randrange(low, high)) for _ in range(draw.randrange(1, 8)))
            figure = f"{draw.uniform(-1e6, 1e6):.{draw.randrange(5)}f}"
            parts.append(draw.choice((word, word, figure, str(draw.getrandbits(64)))))
            parts.append(
                draw.choice((" ", " ", "  ", "\t", " " * draw.randrange(3, 20), "", "'s "))
            )
        found.append("".join(parts))
    return found


@pytest.fixture(scope="module")
def lines() -> list[str]:
    parts = (documentation(), sources(), made_up(2_500))
    found = [line for part in parts for line in part if line.strip()]
    draw = random.Random(5)
    draw.shuffle(found)
    assert len(found) >= NUM_LINES
    return found[:NUM_LINES]


def train_sentencepiece(lines: list[str], folder: Path) -> sentencepiece.SentencePieceProcessor:
    """A model like Llama's, trained by SentencePiece itself: `tokenizer.model` in `folder`."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), model_type="bpe",
        vocab_size=1200, byte_fallback=True, split_digits=True, character_coverage=0.99,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def assert_equal(own: Tokenizer | None, lines: list[str], wanted: list[list[int]]) -> None:
    assert own is not None
    found = [own.encode(line, add_special_tokens=False) for line in lines]
    different = [
        (line, mine, theirs)
        for line, mine, theirs in zip(lines, found, wanted, strict=True)
        if mine != theirs
    ]
    assert not different, (len(different), different[0])


def test_a_sentencepiece_model(lines: list[str], tmp_path: Path) -> None:
    """tokenizer.model, and a GGUF file of it."""
    processor = train_sentencepiece(lines[:1500], tmp_path)
    wanted = processor.encode(lines)
    assert_equal(Tokenizer.from_model(tmp_path), lines, wanted)
    ids = range(processor.vocab_size())
    tokens = [processor.id_to_piece(i) for i in ids]
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else
        6 if processor.is_byte(i) else 1 for i in ids
    ]  # fmt: skip
    scores = [processor.get_score(i) for i in ids]
    made = draft("llama", tokens, kinds, scores=scores, bos_token_id=1)
    assert_equal(Tokenizer.from_model(written(made, tmp_path / "m.gguf")), lines, wanted)


def test_merges_and_gguf_of_a_byte_level_model(lines: list[str], tmp_path: Path) -> None:
    """vocab.json with merges.txt, and a GGUF file, against the tokenizer.json they came from."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(lines[:3000], trainer)
    wanted = [encoding.ids for encoding in trained.encode_batch(lines)]
    model = json.loads(trained.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    assert_equal(Tokenizer.from_model(tmp_path), lines, wanted)
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3, *([1] * (len(tokens) - 1))]
    made = draft("gpt2", tokens, kinds, merges=merges, pre="gpt-2")
    assert_equal(Tokenizer.from_model(written(made, tmp_path / "m.gguf")), lines, wanted)
