"""Train a model: bfloat16 arithmetic, float32 master weights, Muon for the matrices.

The budget is computing time, not wall time: on a CPU the process's own, shared out over its
threads. The learning rate follows the budget's progress
and ends at zero with it, so stopping there gives a finished model.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples.train_demo.rows import Rows, RowSource
from examples.train_demo.sparsity import RateControl


@dataclass(frozen=True)
class TrainingConfig:
    """What a training is made of; learning rates are peaks."""

    minutes: float
    device: str = "cpu"
    seed: int = 1
    chat_rows: int = 20
    chat_tokens: int = 256
    text_rows: int = 4
    text_tokens: int = 512
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    matrix_decay: float = 0.05
    warm_up: float = 0.01
    decay_from: float = 0.45
    density: float = 0.09
    exponent: float = 0.8

    @property
    def tokens_per_step(self) -> int:
        """Tokens of both kinds of rows, padding included."""
        return self.chat_rows * self.chat_tokens + self.text_rows * self.text_tokens


@dataclass
class Progress:
    """How far the training is; budget_s is the computing time used."""

    step: int = 0
    tokens: int = 0
    budget_s: float = 0.0
    chat_loss: float = 0.0
    text_loss: float = 0.0
    density: float = 0.5


def model_config(vocab_size: int, bos_id: int, eos_id: int, pad_id: int) -> LlamaConfig:
    """A Llama with a ReGLU feed-forward network: 12 million parameters."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1920,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="relu",
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        attn_implementation="sdpa",
    )


class Trainer:
    """A float32 master model, its bfloat16 working copy, two optimizers, the sparsity control."""

    def __init__(
        self,
        config: TrainingConfig,
        model: LlamaConfig,
        source: RowSource,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.source, self.progress = config, source, Progress()
        self.master = LlamaForCausalLM(model).to(config.device)
        self.work = copy.deepcopy(self.master).to(torch.bfloat16)
        self.control = RateControl.watching(self.work, config.density, config.exponent)
        named = list(self.master.named_parameters())
        tables = ("embed", "router")  # rows of their own, one a token or an expert
        is_matrix = {n: p.ndim == 2 and not any(part in n for part in tables) for n, p in named}
        matrices = [p for name, p in named if is_matrix[name]]
        others = [p for name, p in named if not is_matrix[name]]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, weight_decay=config.matrix_decay), config.matrix_rate),
            (torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0), config.other_rate),
        ]

    def run(self, show: Callable[[Progress], None]) -> None:
        """Train until the budget is spent."""
        config, progress = self.config, self.progress
        chat = self.source.chat_batches(config.chat_rows, config.chat_tokens)
        text = self.source.text_batches(config.text_rows, config.text_tokens)
        started = self._clock()
        while (done := progress.budget_s / (config.minutes * 60)) < 1:
            self.step(next(chat), next(text), self._rate(done))
            progress.budget_s = self._clock() - started
            show(progress)

    def step(self, chat: Rows, text: Rows, rate: float) -> None:
        """One optimizer step on both kinds of rows; rate scales the learning rates."""
        share = self.config.chat_rows * self.config.chat_tokens / self.config.tokens_per_step
        chat_loss = self._backward(chat, share, masked=True)
        text_loss = self._backward(text, 1 - share, masked=False)
        for master, work in zip(self.master.parameters(), self.work.parameters(), strict=True):
            master.grad = None if work.grad is None else work.grad.float()
            work.grad = None
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
        with torch.no_grad():
            for master, work in zip(self.master.parameters(), self.work.parameters(), strict=True):
                work.copy_(master)
            self.control.update(rate)
        progress, keep = self.progress, 0.95 if self.progress.step else 0.0
        progress.step += 1
        progress.tokens += self.config.tokens_per_step
        progress.chat_loss += (1 - keep) * (chat_loss - progress.chat_loss)
        progress.text_loss += (1 - keep) * (text_loss - progress.text_loss)
        progress.density = float(self.control.rates.mean())

    def _backward(self, rows: Rows, share: float, masked: bool) -> float:
        """Add the gradients of share * (loss + penalty); the loss, a weighted mean in nats."""
        ids, weights = self._tensor(rows.ids), self._tensor(rows.weights)
        mask = None
        if masked:
            documents = self._tensor(rows.document_ids)
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same & torch.ones_like(same[0, 0]).tril()
        hidden = self.work.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self._tensor(rows.positions),
            use_cache=False,
        ).last_hidden_state
        wanted = weights[:, 1:] > 0
        logits = self.work.lm_head(hidden[:, :-1][wanted])
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")
        kept = weights[:, 1:][wanted]
        loss = (losses.float() * kept).sum() / kept.sum()
        ((loss + self.control.penalty()) * share).backward()
        return float(loss.detach())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self.config.device)

    def _rate(self, done: float) -> float:
        """The learning rate's factor: a short rise, a plateau, a straight line to zero."""
        if done < self.config.warm_up:
            return max(done / self.config.warm_up, 0.02)
        return min(1.0, (1 - done) / (1 - self.config.decay_from))

    def _clock(self) -> float:
        if self.config.device == "cpu":
            return time.process_time() / torch.get_num_threads()
        return time.perf_counter()
