"""One step of the model: token ids in, logits out, two exchanges a layer."""

from collections.abc import Sequence

import numpy as np

from actors.exchange import Exchange
from actors.step_times import StepTimes
from model.config import ModelConfig
from model.weights import EmbeddingWeights
from numba_kernels.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    BUSY_NS,
    FFN,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    SKIP_SILENT,
)
from numba_kernels.merge import merge_partials

GPU = 0  # the service of attention and head; the CPU services follow


class Engine:
    """Knows the order of things: attention, FFN partials, their sum, layer by layer, the head."""

    def __init__(
        self, config: ModelConfig, embedding: EmbeddingWeights, exchange: Exchange, mode: str
    ) -> None:
        """`mode` is "dense" (all neurons) or "exact" (up and down only where the gate fired)."""
        self.config = config
        self.exchange = exchange
        self.mode = mode
        self.max_tokens = exchange.wires.hidden.shape[0]
        self._embedding = embedding
        self._cpus = list(range(1, exchange.wires.requests.shape[0]))
        self.times = StepTimes()

    def step(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        num_logits: int = 1,
    ) -> np.ndarray:
        """Run tokens through the model; returns logits of the last `num_logits` of them.

        Token t stands at positions[t] of sequence slots[t], whose earlier positions are in the KV
        cache or earlier in this step. More tokens than a kernel takes must be one sequence's.
        Shapes:  token_ids, positions, slots (T,), T <= max_tokens; result (num_logits, V) float32,
                 a view that the next step overwrites
        Errors:  ServiceError if a service died or hangs, RequestError if one failed
        """
        num_tokens = len(token_ids)
        wires, times = self.exchange.wires, self.times
        with times.step(num_tokens):
            wires.positions[:num_tokens] = positions
            wires.slots[:num_tokens] = slots
            wires.hidden[:num_tokens] = self._embedding.lookup(
                np.asarray(token_ids, np.int64), np.asarray(positions, np.int64)
            )
            for layer in range(self.config.num_layers):
                self._layer(layer, num_tokens)
            if num_logits == 0:
                return wires.logits[:0]
            request = wires.requests[GPU]
            request[OPERATION], request[NUM_TOKENS] = HEAD, num_tokens
            request[FIRST_LOGIT] = num_tokens - num_logits
            times.add("head", self.exchange.ask([GPU]), wires.replies[GPU, BUSY_NS])
        return wires.logits[:num_logits]

    def _layer(self, layer: int, num_tokens: int) -> None:
        wires, times = self.exchange.wires, self.times
        request = wires.requests[GPU]
        request[OPERATION], request[LAYER], request[NUM_TOKENS] = ATTENTION, layer, num_tokens
        times.add("attention", self.exchange.ask([GPU]), wires.replies[GPU, BUSY_NS])
        requests = wires.requests[1:]
        requests[:, OPERATION], requests[:, LAYER], requests[:, NUM_TOKENS] = FFN, layer, num_tokens
        requests[:, SKIP_SILENT] = self.mode != "dense"
        requests[:, NUM_IDS] = ALL_NEURONS
        waited_ns = self.exchange.ask(self._cpus)
        times.add("ffn", waited_ns, wires.replies[1:, BUSY_NS].max())
        times.count_neurons(int(wires.replies[1:, NUM_COMPUTED].sum()))
        merge_partials(wires.mixed, wires.partials, 1, num_tokens, wires.hidden)
