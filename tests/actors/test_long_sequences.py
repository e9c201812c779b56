"""Steps over sequences of several segments: the same bits whatever is computed beside a token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.numba_kernels.decode.attention import SEGMENT_POSITIONS
from tests.actors.in_process import InProcessSystem
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import VOCAB_SIZE

LENGTH = 2 * SEGMENT_POSITIONS + 40
IDS = np.random.default_rng(3).integers(0, VOCAB_SIZE, LENGTH)


@dataclass
class LongSystem(InProcessSystem):
    """Three sequences; the attention service has its own number of threads, the FFN's has one."""

    attention_threads: int = 1
    num_slots: int = 3
    num_positions: int = LENGTH

    def gpu_spec(self) -> ServiceSpec:
        """With so many threads."""
        return replace(super().gpu_spec(), num_threads=self.attention_threads)


def filled(system: InProcessSystem, slots: list[int]) -> Engine:
    """An engine whose slots hold all but the last 8 of IDS, begun with another token each."""
    engine = system.engine("dense")
    for slot in slots:
        for first in range(0, LENGTH - 8, 32):
            ids = IDS[first : min(first + 32, LENGTH - 8)].tolist()
            if not first:
                ids[0] = slot
            step = range(first, first + len(ids))
            engine.step(ids, step, [slot] * len(ids), 0)
    return engine


@pytest.mark.parametrize(
    ("variant", "kv_dtype"), [("llama-gqa", "float16"), ("qwen3-windows", "q8")]
)
def test_bits_depend_on_a_tokens_own_text_alone(tiny: Tiny, variant: str, kv_dtype: str) -> None:
    """Alone, verified with others of its sequence, beside other sequences, by 1 to 3 threads."""
    last, places = IDS[-8:].tolist(), list(range(LENGTH - 8, LENGTH))
    expected: list[np.ndarray] = []
    for num_threads in (1, 2, 3):
        path = tiny(variant).path
        with LongSystem(path, kv_dtype=kv_dtype, attention_threads=num_threads) as system:
            engine = filled(system, [0, 1, 2])
            alone = [
                engine.step([token], [place], [1]).copy()[0]
                for token, place in zip(last, places, strict=True)
            ]
            together = engine.step(last, places, [1] * 8, 8).copy()
            np.testing.assert_array_equal(together, alone)
            # A short text, the same positions of another sequence, and half of this one.
            ffn_residual = engine.step(
                [5, *last[:3], *last[:5]], [0, *places[:3], *places[:5]], [0, *[2] * 3, *[1] * 5], 5
            ).copy()
            np.testing.assert_array_equal(ffn_residual, alone[:5])
            expected = expected or alone
            np.testing.assert_array_equal(alone, expected)
