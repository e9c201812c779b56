"""Topics of a random mixture's vocabulary, and the text that its layers are fitted to.

Hidden states of unrelated tokens have nothing in common from one token to the next, so no router
could choose the same experts again. So each token is of a topic, whose direction is a part of its
embedding, and the head prefers tokens of the current topic (see make.py): text stays in a topic for
some twenty tokens. With this length and number of topics, of 128 experts 8 of which are chosen and
0.45 kept, 0.80 stand among those of the last eight tokens and 0.89 among the 40% used last. Others
measured 0.45, 0.80 and 0.90 to 0.95 of Qwen3-30B-A3B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hotcold.model.synthetic.random_source import NormalSource

NUM_TOPICS = 32
STAYING = 0.95  # share of tokens with the topic of the one before, of greedy text
_COMMON_SHARE = 0.5  # of an embedding's energy
_TOPIC_SHARE = 0.15
_RUN_TOKENS = 16
# Deviation of logits, times sqrt(2 ln n), above which few of n have most of the probability.
_PEAKED = 1.5
_BISECTIONS = 12


@dataclass(frozen=True)
class SampleText:
    """Sequences of random tokens, all of one length, one after another."""

    num_sequences: int
    sequence_tokens: int
    topics: torch.Tensor | None = None  # (T,) of a mixture's tokens

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all sequences."""
        return self.num_sequences * self.sequence_tokens

    @property
    def num_fitted(self) -> int:
        """Tokens of the first sequences, which are fitted; the others check the fit."""
        return self.num_tokens // 2


@dataclass(frozen=True)
class Topics:
    """Orthonormal directions: what all embeddings have in common, and one of each topic.

    Token v is of topic v % M.
    Shapes:  common (D,), directions (M, D); float32
    """

    common: torch.Tensor
    directions: torch.Tensor

    @classmethod
    def draw(cls, vocab: int, hidden: int, source: NormalSource) -> Topics:
        """Draw the directions; small models have fewer topics."""
        count = max(2, min(NUM_TOPICS, hidden // 8, vocab // 8))
        columns = torch.linalg.qr(source.normal((hidden, count + 1))).Q
        return cls(columns[:, 0].contiguous(), columns[:, 1:].T.contiguous())

    @property
    def count(self) -> int:
        """M, the number of topics."""
        return len(self.directions)

    def take_out_of(self, rows: torch.Tensor) -> None:
        """Make `rows` (N, D) orthogonal to all directions, in place."""
        structure = torch.cat([self.common[None], self.directions])
        rows.addmm_(rows @ structure.T, structure, alpha=-1)

    def embedding(self, vocab: int, source: NormalSource) -> torch.Tensor:
        """Return embeddings (V, D) whose numbers have deviation 1 before what is common."""
        hidden = len(self.common)
        rows = source.normal((vocab, hidden), (1 - _COMMON_SHARE - _TOPIC_SHARE) ** 0.5)
        self.take_out_of(rows)
        parts = self.directions * (_TOPIC_SHARE * hidden) ** 0.5
        parts += self.common * (_COMMON_SHARE * hidden) ** 0.5
        for topic, part in enumerate(parts):
            rows[topic :: self.count] += part
        return rows

    def sample(self, vocab: int, source: NormalSource) -> tuple[torch.Tensor, SampleText]:
        """Return token ids (T,) of a text that has each topic equally often, in long runs."""
        runs = source.permutation(NUM_TOPICS) % self.count
        topics = runs.repeat_interleave(_RUN_TOKENS)
        members = source.token_ids((len(topics),), vocab // self.count)
        text = SampleText(NUM_TOPICS // 2, 2 * _RUN_TOKENS, topics)
        return topics + members * self.count, text

    def head(
        self, vocab: int, outputs: torch.Tensor, text: SampleText, source: NormalSource
    ) -> torch.Tensor:
        """Return a head (V, D): STAYING of the likeliest tokens after `outputs` keep the topic.

        Logits spread more than a dense model's, so that a few tokens have most of the probability,
        as in a trained model: what is drawn then keeps to a topic nearly as the likeliest do.
        Shapes:  outputs (T, D), the normed last hidden states of `text`
        """
        hidden, members = outputs.shape[1], vocab / self.count
        deviation = _PEAKED * (2 * math.log(members)) ** 0.5
        head = source.normal((vocab, hidden), deviation * hidden**-0.5)
        self.take_out_of(head)
        direction = torch.nn.functional.normalize(outputs.mean(dim=0), dim=0)
        head.addr_(head @ direction, direction, alpha=-1)
        along, logits = outputs @ self.directions.T, outputs @ head.T
        best = [logits[:, topic :: self.count].amax(dim=1) for topic in range(self.count)]
        of_topics = torch.stack(best, dim=1)  # (T, M)
        low, high = 0.0, 4 * float(logits.abs().max()) / float(along.amax(dim=1).mean())
        for _ in range(_BISECTIONS):
            strength = (low + high) / 2
            stays = (of_topics + strength * along).argmax(dim=1) == text.topics
            is_low = float(stays.float().mean()) < STAYING
            low, high = (strength, high) if is_low else (low, strength)
        for topic, part in enumerate(high * self.directions):
            head[topic :: self.count] += part
        return head
