"""One step of the model: token ids in, logits out, two exchanges a layer.

The order within a layer is in `numba_kernels.serve.layer_loop`, which yields to the engine for what
compiled code cannot do. A step may be run layer by layer: `place`, then `run_layer` for each, then
`logits`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS, MATRIX_TOKENS
from hotcold.actors.telemetry.step_times import StepTimes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, not_zero
from hotcold.numba_kernels.decode.finite import finite_rows
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.serve import layer_loop
from hotcold.numba_kernels.serve.layer_loop import (
    ATTENTION_SERVICE,
    LayerFacts,
    begin_layers,
    new_layer_state,
    run_layers,
)
from hotcold.numba_kernels.serve.mailbox import (
    BUSY_NS,
    BYTES_READ,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NEXT_LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PARTS_MISSED,
    ROUND,
    SEND,
    STREAM,
    SharedBuffers,
    threshold_words,
)
from hotcold.numba_kernels.serve.predict_team import NO_TEAM
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.sign_team import INPUTS

_UNKNOWN = -1  # how many upload rounds there are, before the first


class Engine:
    """Runs attention, the FFN's partial outputs and their sum, layer by layer, then the head."""

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

        With a `predictor`, steps of few tokens request the neurons that it chooses, longer ones
        all: few stay silent throughout. Of layer l the GPU service holds num_hot[l] neurons, which
        need no predictor; none without it.
        """
        self.config = config
        self.exchange = exchange
        self.mode = mode
        self.max_tokens = exchange.buffers.hidden.shape[0]
        self.kernel_tokens = min(KERNEL_TOKENS, self.max_tokens)  # of any sequences
        self.embedding = embedding
        self.predictor = predictor
        self._thresholds = thresholds or _default_thresholds(config, mode)
        # Called before steps that services compute by matmul, which they may not have loaded yet.
        self.prepare_matmul: Callable[[], None] = lambda: None
        self.chunks_at_once = 1  # of a long prompt go through each layer together
        self.neuron_upload_tokens = 0  # prompts this long have all neurons uploaded to a GPU
        self.use_services(np.zeros(config.num_layers, np.int64) if num_hot is None else num_hot)
        self.times = StepTimes()
        self.num_steps = 0
        self._reads = np.zeros((0, 0), np.int64)  # what services had read before this step
        self._layer_state = new_layer_state()

    def in_mode(self, mode: str, thresholds: Sequence[Thresholds] | None = None) -> "Engine":
        """Another engine on the same services, without a predictor."""
        return Engine(
            self.config, self.embedding, self.exchange, mode, None, self.num_hot, thresholds
        )

    def use_services(self, num_hot: np.ndarray) -> None:
        """Use all services that the exchange has now; the GPU service holds num_hot[l] neurons."""
        config = self.config
        self.num_hot = num_hot
        self._facts = LayerFacts(
            thresholds=threshold_words(self._thresholds),
            num_hot=num_hot.astype(np.int64),
            ffn_size=config.ffn_size,
            output_norm=self.embedding.ffn_output_norm,
            norm_kind=norm_kind(config.norm_kind),
            norm_epsilon=np.float32(config.norm_eps),
            residual_scale=np.float32(config.residual_scale),
            services=np.arange(self.exchange.buffers.requests.shape[0]),
        )

    @property
    def thresholds(self) -> Sequence[Thresholds]:
        """Which neurons of each layer fire."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, thresholds: Sequence[Thresholds]) -> None:
        self._thresholds = thresholds
        self._facts = self._facts._replace(thresholds=threshold_words(thresholds))

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
        The same step may be run again, whatever it ended with.
        Shapes:  token_ids, positions, slots (T,), T <= max_tokens; result (num_logits, V) float32,
                 a view that the next step overwrites
        Errors:  ServiceError if a service died or hangs, RequestError if one failed,
                 NotFiniteError if numbers are not finite
        """
        num_tokens = len(token_ids)
        with self.times.step(num_tokens):
            self.place(token_ids, positions, slots)
            self._run_layers(range(self.config.num_layers), num_tokens)
            self.num_steps += 1
            self._count_reads()
            return self.logits(num_tokens, num_logits)

    def _count_reads(self) -> None:
        """Count what services have read from storage since the last step."""
        found = self.exchange.buffers.replies[1:, BYTES_READ : PARTS_MISSED + 1]
        if not found.any():
            return
        before = self._reads if self._reads.shape == found.shape else np.zeros_like(found)
        grown = np.where(found >= before, found - before, found)  # a new process counts from 0
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
            self.prepare_matmul()
        buffers = self.exchange.buffers
        buffers.positions[:num_tokens] = positions
        buffers.slots[:num_tokens] = slots
        buffers.hidden[:num_tokens] = self.embedding.lookup(
            np.asarray(token_ids, np.int64), np.asarray(positions, np.int64)
        )
        if not finite_rows(buffers.hidden, num_tokens):
            bad = _bad_rows(buffers.hidden[:num_tokens])
            raise _not_finite(buffers, "in its token embeddings", bad, None)

    def _multiplies(self, num_tokens: int) -> bool:
        """Whether services compute such a step by matmul."""
        return num_tokens >= MATRIX_TOKENS

    def run_layer(self, layer: int, num_tokens: int, next_layer: int) -> None:
        """Run the tokens that were placed through one layer.

        `next_layer`, an index or the number of layers, will be run next, of any tokens. Between
        layers only `hidden`, `positions` and `slots` matter.
        Errors:  those of `step`
        """
        is_known = next_layer < self.config.num_layers
        self.exchange.buffers.requests[1:, NEXT_LAYER] = next_layer + 1 if is_known else 0
        self._run_layers(range(layer, layer + 1), num_tokens)

    def _run_layers(self, layers: range, num_tokens: int) -> None:
        layer_state, exchange = self._layer_state, self.exchange
        team = NO_TEAM if self.predictor is None else self.predictor.team
        predicts = layer_loop.NOBODY
        if self.predictor is not None and num_tokens <= KERNEL_TOKENS:
            predicts = layer_loop.IN_TEAM if team.num_threads else layer_loop.IN_PYTHON
        own_ffn, read = self._runs_ffn(num_tokens), INPUTS[self._predictor_input()]
        begin_layers(layer_state, layers, num_tokens, predicts, own_ffn, read)
        while reason := run_layers(
            layer_state, exchange.request_state, exchange.buffers, self._facts, team
        ):
            self._continue(reason, int(layer_state[layer_loop.AT_LAYER]), num_tokens)
        self.times.add_layers(layer_state)

    def _continue(self, reason: int, layer: int, num_tokens: int) -> None:
        """Do what the layer loop yielded for."""
        layer_state, exchange = self._layer_state, self.exchange
        if reason == layer_loop.SEND_REQUESTS:
            layer_state[layer_loop.REQUEST_WAITED_NS] = exchange.request(self._requested())
        elif reason == layer_loop.RESUME:
            layer_state[layer_loop.REQUEST_WAITED_NS] += exchange.await_replies(self._requested())
        elif reason == layer_loop.ANNOUNCE:
            name, number = self._predictor_input(), exchange.next_number
            assert self.predictor is not None
            self.predictor.announce(layer, num_tokens, name, number)
        elif reason == layer_loop.CHOOSE:
            self._choose(layer, num_tokens)
        elif reason == layer_loop.COMPUTE:
            self._ffn(layer, num_tokens)
        else:
            raise _bad_layer(
                exchange.buffers, layer, num_tokens, int(layer_state[layer_loop.FIRST])
            )

    def _requested(self) -> range:
        """The services that the layer loop sends requests to."""
        return range(
            int(self._layer_state[layer_loop.FIRST]), int(self._layer_state[layer_loop.END])
        )

    def logits(self, num_tokens: int, num_logits: int) -> np.ndarray:
        """Logits of the last `num_logits` tokens after the last layer; as in `step`."""
        buffers = self.exchange.buffers
        if num_logits == 0:
            return buffers.logits[:0]
        request = buffers.requests[ATTENTION_SERVICE]
        request[OPERATION], request[NUM_TOKENS] = HEAD, num_tokens
        request[FIRST_LOGIT] = num_tokens - num_logits
        self.times.add(
            "head",
            self.exchange.request([ATTENTION_SERVICE]),
            buffers.replies[ATTENTION_SERVICE, BUSY_NS],
        )
        if not finite_rows(buffers.logits, num_logits):
            bad = np.zeros(num_tokens, bool)
            bad[num_tokens - num_logits :] = _bad_rows(buffers.logits[:num_logits])
            raise _not_finite(buffers, "in its logits", bad, ATTENTION_SERVICE)
        return buffers.logits[:num_logits]

    def _runs_ffn(self, num_tokens: int) -> bool:
        """Whether `_ffn` runs the FFN of such steps, instead of the layer loop."""
        least = self.neuron_upload_tokens
        return bool(least) and num_tokens >= max(least, MATRIX_TOKENS)

    def _ffn(self, layer: int, num_tokens: int) -> None:
        """Let the partial outputs of `_requested` be the FFN's; the request words are written."""
        if self.num_hot[layer] == self.config.ffn_size:
            self._request_ffn(self.config.ffn_size)
            return
        self._upload_ffn(layer, num_tokens)
        self.times.count_neurons(*[self.config.ffn_size] * 3)
        self._layer_state[layer_loop.FIRST], self._layer_state[layer_loop.END] = (
            ATTENTION_SERVICE,
            ATTENTION_SERVICE + 1,
        )

    def _request_ffn(self, num_gates: int) -> tuple[int, int]:
        """Send `_requested` their requests; returns num_computed, num_up of their replies."""
        services = self._requested()
        waited_ns = self.exchange.request(services)
        replies = self.exchange.buffers.replies[services.start : services.stop]
        self.times.add("ffn", waited_ns, replies[:, BUSY_NS].max())
        num_computed, num_up = replies[:, [NUM_COMPUTED, NUM_UP]].sum(axis=0).tolist()
        self.times.count_neurons(num_computed, num_up, num_gates)
        return num_computed, num_up

    def _upload_ffn(self, layer: int, num_tokens: int) -> None:
        """Compute the whole FFN in the attention service, all neurons uploaded to its GPU.

        In each round the CPU services copy the next neurons into the arena, while the GPU service
        takes those of the round before from the other place. A round may be requested again: the
        GPU service does not add twice what it has added.
        """
        buffers = self.exchange.buffers
        services = range(buffers.requests.shape[0])
        buffers.requests[:, LAYER], buffers.requests[:, NUM_TOKENS] = layer, num_tokens
        buffers.requests[ATTENTION_SERVICE, OPERATION], buffers.requests[1:, OPERATION] = (
            STREAM,
            SEND,
        )
        number, num_rounds = 0, _UNKNOWN
        while num_rounds == _UNKNOWN or number <= num_rounds:
            buffers.requests[:, ROUND] = number
            buffers.requests[ATTENTION_SERVICE, NUM_IDS] = num_rounds
            requested = services if number != num_rounds else services[:1]
            waited_ns = self.exchange.request(requested)
            self.times.add("ffn", waited_ns, buffers.replies[requested, BUSY_NS].max())
            if num_rounds == _UNKNOWN:
                num_rounds = int(buffers.replies[1:, NUM_COMPUTED].max())
            number += 1

    def _choose(self, layer: int, num_tokens: int) -> None:
        """List the neurons that are expected to fire, or leave it at all of them."""
        buffers, started = self.exchange.buffers, time.monotonic_ns()
        assert self.predictor is not None
        x: np.ndarray = getattr(buffers, self._predictor_input())
        chosen = self.predictor.choose(
            layer, x[:num_tokens], buffers.active_ids[1:], buffers.active_masks[1:]
        )
        if chosen is not None:
            buffers.requests[1:, NUM_IDS] = chosen
        self.times.add_predictor(time.monotonic_ns() - started)

    def _predictor_input(self) -> str:
        """The array of the buffers that the predictor reads."""
        if self.predictor is None or self.predictor.input_name == "ffn_input":
            return "ffn_input"
        return "hidden" if self.config.layers[0].order.is_parallel else "mixed"


def _default_thresholds(config: ModelConfig, mode: str) -> list[Thresholds]:
    """Which neurons of each layer fire where no thresholds are given."""
    if mode == THRESHOLD:
        raise ValueError(f"the mode {mode} needs thresholds")
    alike = ALL_FIRE if mode == "dense" else not_zero(config.activation_fn)
    return [alike] * config.num_layers


def _bad_layer(
    buffers: SharedBuffers, layer: int, num_tokens: int, first: int = 1
) -> NotFiniteError:
    """The error of a layer with finite input whose FFN input or output is not finite.

    It names the service that made the first NaN. Partial outputs are those of services `first` and
    after.
    """
    bad = _bad_rows(buffers.mixed[:num_tokens]) | _bad_rows(buffers.ffn_input[:num_tokens])
    guilty = ATTENTION_SERVICE if bad.any() else None
    for service in range(first, buffers.partials.shape[0]):
        bad_partial = _bad_rows(buffers.partials[service, :num_tokens])
        if guilty is None and bad_partial.any():
            guilty = service
        bad |= bad_partial
    bad |= _bad_rows(buffers.hidden[:num_tokens])
    return _not_finite(buffers, f"in layer {layer}", bad, guilty)


def _bad_rows(values: np.ndarray) -> np.ndarray:
    """Which rows are not finite: (T,) bool."""
    bad: np.ndarray = ~np.isfinite(values).all(axis=1)
    return bad


def _not_finite(
    buffers: SharedBuffers, where: str, bad: np.ndarray, guilty: int | None
) -> NotFiniteError:
    slots = buffers.slots[: bad.size][bad]
    return NotFiniteError(where, frozenset(slots.tolist()), guilty)
