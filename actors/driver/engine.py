"""One step of the model: token ids in, logits out, two exchanges a layer.

A step may be run layer by layer: `place`, then `run_layer` for each, then `logits`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from actors.driver.neuron_upload import ffn_with_upload
from actors.driver.not_finite import bad_embedding, bad_layer, bad_logits
from actors.exchange.doorbell_exchange import Exchange
from actors.protocol.messages import THRESHOLD
from actors.protocol.step_sizes import KERNEL_TOKENS, MATRIX_TOKENS
from actors.telemetry.step_times import StepTimes
from model.config.model_config import ModelConfig
from model.weights.embedding import EmbeddingWeights
from numba_kernels.decode.activations import ALL_FIRE, Thresholds, not_zero
from numba_kernels.decode.finite import finite_pair, finite_rows
from numba_kernels.decode.merge import merge_normed, merge_partials
from numba_kernels.decode.norm import norm_kind
from numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    BUSY_NS,
    BYTES_READ,
    FFN,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PARTS_MISSED,
    write_thresholds,
)
from predictors.predictor import NeuronPredictor

GPU = 0  # the service of attention, head and hot neurons; the CPU services follow


class Engine:
    """Knows the order of things: attention, FFN partials, their sum, layer by layer, the head."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: EmbeddingWeights,
        exchange: Exchange,
        mode: str,
        predictor: NeuronPredictor | None = None,
        num_hot: np.ndarray | None = None,
        thresholds: Sequence[Thresholds] | None = None,
    ) -> None:
        """`mode` "dense" computes all neurons, others up and down only where the gate fired.

        A neuron fires where its activation is not zero, or where it passes its layer's
        `thresholds`; services then have the lengths of down rows.

        With a `predictor`, steps of few tokens ask for the neurons that it chooses, longer ones
        for all: few stay silent throughout. Of each layer the GPU service holds num_hot[l] neurons,
        which need no predictor; none without it.
        """
        self.config = config
        self.exchange = exchange
        self.mode = mode
        self.max_tokens = exchange.wires.hidden.shape[0]
        self.kernel_tokens = min(KERNEL_TOKENS, self.max_tokens)  # of any sequences
        self.embedding = embedding
        self.predictor = predictor
        self.thresholds = thresholds or _own_thresholds(config, mode)
        # Called before steps that services answer by matrix products, which they may not have yet.
        self.prepare_products: Callable[[], None] = lambda: None
        self.neuron_upload_tokens = 0  # prompts this long have all neurons uploaded to a GPU
        self.use_services(np.zeros(config.num_layers, np.int64) if num_hot is None else num_hot)
        self.times = StepTimes()
        self.num_steps = 0
        self._reads = np.zeros((0, 0), np.int64)  # what services had read before this step

    def use_services(self, num_hot: np.ndarray) -> None:
        """Ask all services that the exchange has now; the GPU service holds num_hot[l] neurons."""
        self.num_hot = num_hot
        self._num_services = self.exchange.wires.requests.shape[0]

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
        The same step may be run again, whatever it ended with.
        Errors:  ServiceError if a service died or hangs, RequestError if one failed,
                 NotFiniteError if numbers are not finite
        """
        num_tokens = len(token_ids)
        with self.times.step(num_tokens):
            self.place(token_ids, positions, slots)
            for layer in range(self.config.num_layers):
                self.run_layer(layer, num_tokens)
            self.num_steps += 1
            self._count_reads()
            return self.logits(num_tokens, num_logits)

    def _count_reads(self) -> None:
        """Count what services say that they have read since they were asked last."""
        found = self.exchange.wires.replies[1:, BYTES_READ : PARTS_MISSED + 1]
        if not found.any():
            return
        before = self._reads if self._reads.shape == found.shape else np.zeros_like(found)
        grown = np.where(found >= before, found - before, found)  # a fresh service counts anew
        self._reads = found.copy()
        num_bytes, _, num_wanted, num_missed = grown.sum(axis=0).tolist()
        waited_ns = int(grown[:, 1].max())
        self.times.count_reads([num_bytes, waited_ns, num_wanted, num_missed])

    def place(
        self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Put a step's tokens where the layers find them. Shapes: (T,) each."""
        num_tokens = len(token_ids)
        if self._multiplies(num_tokens):
            self.prepare_products()
        wires = self.exchange.wires
        wires.positions[:num_tokens] = positions
        wires.slots[:num_tokens] = slots
        wires.hidden[:num_tokens] = self.embedding.lookup(
            np.asarray(token_ids, np.int64), np.asarray(positions, np.int64)
        )
        if not finite_rows(wires.hidden, num_tokens):
            raise bad_embedding(wires, num_tokens)

    def _multiplies(self, num_tokens: int) -> bool:
        """Whether services answer such a step by matrix products."""
        return num_tokens >= MATRIX_TOKENS

    def run_layer(self, layer: int, num_tokens: int) -> None:
        """Bring the hidden states of the tokens that were placed through one layer.

        Between layers only `hidden`, `positions` and `slots` matter.
        Errors:  those of `step`
        """
        wires, times = self.exchange.wires, self.times
        request = wires.requests[GPU]
        request[OPERATION], request[LAYER], request[NUM_TOKENS] = ATTENTION, layer, num_tokens
        write_thresholds(request, self.thresholds[layer])  # a GPU begins with its hot ones unasked
        if self.predictor is not None and self._predicts(num_tokens):
            name, number = self._predictor_input(), self.exchange.next_number
            self.predictor.announce(layer, num_tokens, name, number)
        times.add("attention", self.exchange.ask([GPU]), wires.replies[GPU, BUSY_NS])
        first, partials = self._first_ffn(layer), wires.partials
        if self._uploads_neurons(layer, num_tokens):
            ffn_with_upload(self.exchange, times, layer, num_tokens)
            times.count_neurons(*[self.config.ffn_size] * 3)
            first, partials = GPU, partials[:1]
        else:
            self._ffn(layer, num_tokens)
        self._merge(layer, partials, first, num_tokens)
        # Before anything else is asked: a gate that is NaN fires for nobody, and would hide it.
        if not finite_pair(wires.ffn_input, wires.hidden, num_tokens):
            raise bad_layer(wires, layer, num_tokens, first)

    def _merge(self, layer: int, partials: np.ndarray, first: int, num_tokens: int) -> None:
        """hidden = mixed + the FFN's output, normed and scaled where the model does so."""
        wires, config = self.exchange.wires, self.config
        weight = self.embedding.ffn_output_norm[layer]
        if not weight.size and config.residual_scale == 1:
            merge_partials(wires.mixed, partials, first, num_tokens, wires.hidden)
            return
        kind, epsilon = norm_kind(config.norm_kind), np.float32(config.norm_eps)
        scale = np.float32(config.residual_scale)
        merge_normed(
            wires.mixed, partials, first, num_tokens, kind, weight, epsilon, scale, wires.hidden
        )

    def logits(self, num_tokens: int, num_logits: int) -> np.ndarray:
        """Logits of the last `num_logits` tokens after the last layer; as in `step`."""
        wires = self.exchange.wires
        if num_logits == 0:
            return wires.logits[:0]
        request = wires.requests[GPU]
        request[OPERATION], request[NUM_TOKENS] = HEAD, num_tokens
        request[FIRST_LOGIT] = num_tokens - num_logits
        self.times.add("head", self.exchange.ask([GPU]), wires.replies[GPU, BUSY_NS])
        if not finite_rows(wires.logits, num_logits):
            raise bad_logits(wires, num_tokens, num_logits)
        return wires.logits[:num_logits]

    def _ffn(self, layer: int, num_tokens: int) -> None:
        """Ask for the layer's partial outputs."""
        chosen = self._choose(layer, num_tokens)
        num_gates = self.config.ffn_size
        if chosen is not None:
            num_gates = int(chosen.sum() + self.num_hot[layer])
        num_computed, num_up = self._ask_ffn(FFN, layer, num_tokens, chosen)
        self.times.count_neurons(num_computed, num_up, num_gates)

    def _ask_ffn(
        self, operation: int, layer: int, num_tokens: int, num_ids: np.ndarray | None
    ) -> tuple[int, int]:
        """Ask for all neurons, or of CPU service s num_ids[s] listed ones, and for all hot ones.

        Returns how many neurons were computed, and how many neurons' up was.
        """
        wires, first = self.exchange.wires, self._first_ffn(layer)
        requests, replies = wires.requests[first:], wires.replies[first:]
        requests[:, OPERATION] = operation
        requests[:, LAYER], requests[:, NUM_TOKENS] = layer, num_tokens
        write_thresholds(requests, self.thresholds[layer])
        requests[:, NUM_IDS] = ALL_NEURONS
        if num_ids is not None:
            wires.requests[1:, NUM_IDS] = num_ids
        waited_ns = self.exchange.ask(range(first, self._num_services))
        self.times.add("ffn", waited_ns, replies[:, BUSY_NS].max())
        return int(replies[:, NUM_COMPUTED].sum()), int(replies[:, NUM_UP].sum())

    def _uploads_neurons(self, layer: int, num_tokens: int) -> bool:
        least = self.neuron_upload_tokens
        if not least or num_tokens < max(least, MATRIX_TOKENS):
            return False
        return bool(self.num_hot[layer] < self.config.ffn_size)

    def _first_ffn(self, layer: int) -> int:
        """The first service that holds neurons of the layer."""
        return GPU if self.num_hot[layer] else 1

    def _choose(self, layer: int, num_tokens: int) -> np.ndarray | None:
        """List the neurons that are expected to fire; their numbers, or None for all neurons."""
        if self.predictor is None or not self._predicts(num_tokens):
            return None
        wires, started = self.exchange.wires, time.monotonic_ns()
        x: np.ndarray = getattr(wires, self._predictor_input())
        chosen = self.predictor.choose(
            layer, x[:num_tokens], wires.active_ids[1:], wires.active_masks[1:]
        )
        self.times.add_predictor(time.monotonic_ns() - started)
        return chosen

    def _predicts(self, num_tokens: int) -> bool:
        return self.predictor is not None and num_tokens <= KERNEL_TOKENS

    def _predictor_input(self) -> str:
        """The array of the wires that the predictor reads."""
        if self.predictor is None or self.predictor.input_name == "ffn_input":
            return "ffn_input"
        return "hidden" if self.config.layer_order.is_parallel else "mixed"


def _own_thresholds(config: ModelConfig, mode: str) -> list[Thresholds]:
    """Which neurons of each layer fire where no thresholds are given."""
    if mode == THRESHOLD:
        raise ValueError(f"the mode {mode} needs thresholds")
    alike = ALL_FIRE if mode == "dense" else not_zero(config.activation_fn)
    return [alike] * config.num_layers
