"""A checkpoint, and what transformers says of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.kept import digest_of, kept_array
from tests.patched_models import load_model
from tests.tiny_models import VOCAB_SIZE

if TYPE_CHECKING:  # they take seconds to import, and not every process of a run needs them
    import torch
    from transformers import PreTrainedModel

GREEDY_TOKENS = 64


class TinyCheckpoint:
    """A checkpoint and transformers' answers on it, in float32, each computed once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """A random prompt."""
        return np.random.default_rng(11).integers(0, VOCAB_SIZE, 40)

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """Logits (T, V) of `ids`."""
        return self.logits_of(self.ids)

    @functools.cached_property
    def bfloat16_difference(self) -> float:
        """How far transformers' own logits move when it computes in bfloat16, of the largest."""
        difference = np.abs(self.logits_of(self.ids, "bfloat16") - self.logits).max()
        return float(difference / np.abs(self.logits).max())

    @functools.cached_property
    def greedy_ids(self) -> list[int]:
        """The tokens that greedily follow the first ten of `ids`."""
        return self.greedy_after(self.ids[:10], GREEDY_TOKENS)

    def greedy_after(self, ids: Sequence[int] | np.ndarray, num_tokens: int) -> list[int]:
        """The tokens that greedily follow `ids`, end tokens as any other."""

        def compute() -> np.ndarray:
            import torch

            prompt = torch.tensor(np.asarray(ids))[None]
            out = self._model(torch.float32).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return out[0, prompt.shape[1] :].numpy()

        found: list[int] = self._kept(f"greedy {num_tokens}", ids, compute).tolist()
        return found

    def most_likely_after(self, ids: list[int]) -> int:
        """The token that greedily follows `ids`."""
        return int(self.logits_of(ids)[-1].argmax())

    def logits_of(self, ids: Sequence[int] | np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Logits (T, V) of `ids` in float32, computed in `dtype`."""

        def compute() -> np.ndarray:
            import torch

            with torch.no_grad():
                prompt = torch.tensor(np.asarray(ids))[None]
                return self._model(getattr(torch, dtype))(prompt).logits[0].float().numpy()

        return self._kept(f"logits {dtype}", ids, compute)

    def _kept(self, what, ids, compute) -> np.ndarray:
        asked = np.asarray(ids, np.int64).tobytes()
        return kept_array(f"said-{digest_of(what, asked, *self._contents())}", compute)

    def _contents(self) -> list[bytes]:
        """Of the files that transformers reads for an answer."""
        files = [*self.path.glob("*.safetensors*"), *self.path.glob("*config.json")]
        return [
            content for file in sorted(files) for content in (file.name.encode(), file.read_bytes())
        ]

    def _model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """In float32 by default."""
        import torch

        return load_model(self.path, dtype or torch.float32)


Tiny = Callable[..., TinyCheckpoint]
"""tiny(variant, dtype="float32"), as `tests.conftest` has it."""
