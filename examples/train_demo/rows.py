"""Tokenizer and training rows of the demo model: conversations and running text, packed.

A row is a fixed number of tokens. Conversations are packed whole, several to a row, and do not see
each other; running text is cut anywhere. Every epoch draws new phrasings and a new order.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from examples.train_demo.corpus import Question

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You know the Python standard library.",
    "Answer in one sentence.",
)
ABOUT_ITSELF = "I am a small language model that knows the docstrings of Python's standard library."
SMALL_TALK = (
    ("Hello", "Hello! Ask me about a function of Python's standard library."),
    ("Hi", "Hello! Ask me about a function of Python's standard library."),
    ("Hello!", "Hello! Ask me about a function of Python's standard library."),
    ("Who are you?", ABOUT_ITSELF),
    ("What are you?", ABOUT_ITSELF),
    ("What can you do?", 'I can answer questions such as "What does textwrap.dedent do?"'),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
)
SYSTEM_SHARE, SEVERAL_TURNS_SHARE = 0.1, 0.25
QUESTION_WEIGHT = 0.1
OPEN_ROWS = 32


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with chat turns; encoding a text puts the bos token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


@dataclass(frozen=True)
class Rows:
    """Packed training rows, all of shape (rows, tokens).

    ids int64; weights float32, of the loss of predicting that token; document_ids int64, tokens
    see only their own document; positions int64, counted within the document.
    """

    ids: np.ndarray
    weights: np.ndarray
    document_ids: np.ndarray
    positions: np.ndarray

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(
            self.ids[rows], self.weights[rows], self.document_ids[rows], self.positions[rows]
        )


@dataclass
class RowSource:
    """Endless training rows from questions and documents."""

    tokenizer: PreTrainedTokenizerFast
    asked: Sequence[Question]
    documents: Sequence[str]
    rng: random.Random

    @cached_property
    def document_ids(self) -> list[list[int]]:
        """Each document's ids, from bos to eos."""
        encoded = self.tokenizer(list(self.documents), verbose=False)["input_ids"]
        return [[*ids, self.tokenizer.eos_token_id] for ids in encoded]

    @cached_property
    def segments(self) -> dict[str, list[int]]:
        """The ids of the turns met so far."""
        return {}

    def chat_batches(self, num_rows: int, num_tokens: int) -> Iterator[Rows]:
        """Batches of packed conversations; an epoch asks about every name once."""
        while True:
            conversations = [self._tokens_of(turns) for turns in self._conversations()]
            rows = pack(conversations, num_tokens)
            for start in range(0, len(rows.ids) - num_rows + 1, num_rows):
                yield rows[slice(start, start + num_rows)]

    def text_batches(self, num_rows: int, num_tokens: int) -> Iterator[Rows]:
        """Batches of running text, the documents in a new order each epoch."""
        while True:
            documents = self.rng.sample(self.document_ids, len(self.document_ids))
            stream = np.concatenate([np.asarray(ids) for ids in documents])
            stream = np.roll(stream, self.rng.randrange(num_tokens))
            usable = len(stream) // (num_rows * num_tokens) * num_rows * num_tokens
            ids = stream[:usable].reshape(-1, num_tokens)
            positions = np.broadcast_to(np.arange(num_tokens), ids.shape)
            rows = Rows(ids, np.ones(ids.shape, np.float32), np.zeros_like(ids), positions)
            for start in range(0, len(ids), num_rows):
                yield rows[slice(start, start + num_rows)]

    def _conversations(self) -> Iterator[list[tuple[str, str]]]:
        """(role marker, content) turns; most conversations ask one question."""
        pairs = [(question.phrased(self.rng), question.answer) for question in self.asked]
        pairs += SMALL_TALK
        self.rng.shuffle(pairs)
        while pairs:
            turns = []
            if self.rng.random() < SYSTEM_SHARE:
                turns.append((SYSTEM, self.rng.choice(SYSTEM_PROMPTS)))
            several = self.rng.random() < SEVERAL_TURNS_SHARE
            for _ in range(min(len(pairs), 3 if several else 1)):
                question, answer = pairs.pop()
                turns += [(USER, question), (ASSISTANT, answer)]
            yield turns

    def _tokens_of(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[float]]:
        """The ids that the chat template gives, and each one's weight in the loss."""
        ids, weights = self._segment(BOS)[:], [0.0]
        for role, content in turns:
            segment = self._segment(role + content + EOS)
            ids += segment
            weight = 1.0 if role == ASSISTANT else QUESTION_WEIGHT
            weights += [QUESTION_WEIGHT] + [weight] * (len(segment) - 1)
        return ids, weights

    def _segment(self, text: str) -> list[int]:
        if text not in self.segments:
            encoded = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            self.segments[text] = list(encoded)
        return self.segments[text]


def pack(documents: Sequence[tuple[list[int], list[float]]], num_tokens: int) -> Rows:
    """Put whole documents into rows, each into the first of the open rows with room for it.

    Errors:  ValueError if a document is longer than a row
    """
    full: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for index, (ids, _) in enumerate(documents):
        size = len(ids)
        if size > num_tokens:
            raise ValueError(f"document of {size} tokens, rows of {num_tokens}")
        for slot, (used, members) in enumerate(open_rows):
            if used + size <= num_tokens:
                members.append(index)
                open_rows[slot] = (used + size, members)
                break
        else:
            open_rows.append((size, [index]))
        if len(open_rows) > OPEN_ROWS:
            fullest = max(range(len(open_rows)), key=lambda slot: open_rows[slot][0])
            full.append(open_rows.pop(fullest)[1])
    full += [members for _, members in open_rows]
    return _rows_of(documents, full, num_tokens)


def _rows_of(
    documents: Sequence[tuple[list[int], list[float]]], rows: list[list[int]], num_tokens: int
) -> Rows:
    shape = (len(rows), num_tokens)
    ids, document_ids, positions = (np.zeros(shape, np.int64) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            tokens, token_weights = documents[member]
            span = slice(start, start + len(tokens))
            ids[row, span] = tokens
            weights[row, span] = token_weights
            document_ids[row, span] = number
            positions[row, span] = np.arange(len(tokens))
            start += len(tokens)
    return Rows(ids, weights, document_ids, positions)
