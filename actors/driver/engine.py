"""One step of the model: token ids in, logits out, two exchanges a layer.

The layers' order is told in `numba_kernels.serve.layer_loop`, which comes back to the engine for
what compiled code cannot do. A step may be run layer by layer: `place`, then `run_layer` for each,
then `logits`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from hotcold.actors.driver.neuron_upload import ffn_with_upload
from hotcold.actors.driver.not_finite import bad_embedding, bad_layer, bad_logits
from hotcold.actors.exchange.doorbell_exchange import Exchange
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
    NEXT_LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PARTS_MISSED,
    threshold_words,
)
from hotcold.numba_kernels.serve.predict_team import NO_TEAM
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.sign_team import INPUTS


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
        self.max_tokens = exchange.buffers.hidden.shape[0]
        self.kernel_tokens = min(KERNEL_TOKENS, self.max_tokens)  # of any sequences
        self.embedding = embedding
        self.predictor = predictor
        self._thresholds = thresholds or _own_thresholds(config, mode)
        # Called before steps that services answer by matrix products, which they may not have yet.
        self.prepare_matmul: Callable[[], None] = lambda: None
        self.chunks_at_once = 1  # of a long prompt go through each layer together
        self.neuron_upload_tokens = 0  # prompts this long have all neurons uploaded to a GPU
        self.use_services(np.zeros(config.num_layers, np.int64) if num_hot is None else num_hot)
        self.times = StepTimes()
        self.num_steps = 0
        self._reads = np.zeros((0, 0), np.int64)  # what services had read before this step
        self._layer_state = new_layer_state()

    def use_services(self, num_hot: np.ndarray) -> None:
        """Ask all services that the exchange has now; the GPU service holds num_hot[l] neurons."""
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
        Shapes:  token_ids, positions, slots (T,), T <= max_tokens; result (num_logits, V) float32,
                 a view that the next step overwrites
        The same step may be run again, whatever it ended with.
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
        """Count what services say that they have read since they were asked last."""
        found = self.exchange.buffers.replies[1:, BYTES_READ : PARTS_MISSED + 1]
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
            self.prepare_matmul()
        buffers = self.exchange.buffers
        buffers.positions[:num_tokens] = positions
        buffers.slots[:num_tokens] = slots
        buffers.hidden[:num_tokens] = self.embedding.lookup(
            np.asarray(token_ids, np.int64), np.asarray(positions, np.int64)
        )
        if not finite_rows(buffers.hidden, num_tokens):
            raise bad_embedding(buffers, num_tokens)

    def _multiplies(self, num_tokens: int) -> bool:
        """Whether services answer such a step by matrix products."""
        return num_tokens >= MATRIX_TOKENS

    def run_layer(self, layer: int, num_tokens: int, next_layer: int) -> None:
        """Bring the hidden states of the tokens that were placed through one layer.

        `next_layer` will be run next, of these tokens or of others; none of that number is fine.
        Between layers only `hidden`, `positions` and `slots` matter.
        Errors:  those of `step`
        """
        is_known = next_layer < self.config.num_layers
        self.exchange.buffers.requests[1:, NEXT_LAYER] = next_layer + 1 if is_known else 0
        self._run_layers(range(layer, layer + 1), num_tokens)

    def _run_layers(self, layers: range, num_tokens: int) -> None:
        layer_state, exchange = self._layer_state, self.exchange
        team = NO_TEAM if self.predictor is None else self.predictor.team
        predicts = layer_loop.NOBODY
        if self._predicts(num_tokens):
            predicts = layer_loop.IN_TEAM if team.num_threads else layer_loop.IN_PYTHON
        own_ffn, read = self._asks_ffn(num_tokens), INPUTS[self._predictor_input()]
        begin_layers(layer_state, layers, num_tokens, predicts, own_ffn, read)
        while reason := run_layers(
            layer_state, exchange.request_state, exchange.buffers, self._facts, team
        ):
            self._come_back(reason, int(layer_state[layer_loop.AT_LAYER]), num_tokens)
        self.times.add_layers(layer_state)

    def _come_back(self, reason: int, layer: int, num_tokens: int) -> None:
        """Do what a walk leaves to Python."""
        layer_state, exchange = self._layer_state, self.exchange
        if reason == layer_loop.ASK:
            layer_state[layer_loop.ASK_WAITED_NS] = exchange.ask(self._asked())
        elif reason == layer_loop.RESUME:
            layer_state[layer_loop.ASK_WAITED_NS] += exchange.resume(self._asked())
        elif reason == layer_loop.ANNOUNCE:
            name, number = self._predictor_input(), exchange.next_number
            assert self.predictor is not None
            self.predictor.announce(layer, num_tokens, name, number)
        elif reason == layer_loop.CHOOSE:
            self._choose(layer, num_tokens)
        elif reason == layer_loop.COMPUTE:
            self._ffn(layer, num_tokens)
        else:
            first = int(layer_state[layer_loop.FIRST])
            raise bad_layer(exchange.buffers, layer, num_tokens, first)

    def _asked(self) -> range:
        """The services that the walk asks."""
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
            self.exchange.ask([ATTENTION_SERVICE]),
            buffers.replies[ATTENTION_SERVICE, BUSY_NS],
        )
        if not finite_rows(buffers.logits, num_logits):
            raise bad_logits(buffers, num_tokens, num_logits)
        return buffers.logits[:num_logits]

    def _asks_ffn(self, num_tokens: int) -> bool:
        """Whether `_ffn` asks for the FFN of such steps, instead of the walk."""
        least = self.neuron_upload_tokens
        return bool(least) and num_tokens >= max(least, MATRIX_TOKENS)

    def _ffn(self, layer: int, num_tokens: int) -> None:
        """Let the partial outputs of `_asked` be the layer's FFN; the request words are written."""
        if self.num_hot[layer] == self.config.ffn_size:
            self._ask_ffn(self.config.ffn_size)
            return
        ffn_with_upload(self.exchange, self.times, layer, num_tokens)
        self.times.count_neurons(*[self.config.ffn_size] * 3)
        self._layer_state[layer_loop.FIRST], self._layer_state[layer_loop.END] = (
            ATTENTION_SERVICE,
            ATTENTION_SERVICE + 1,
        )

    def _ask_ffn(self, num_gates: int) -> tuple[int, int]:
        """Ask `_asked`; returns how many neurons were computed, and how many neurons' up was."""
        services = self._asked()
        waited_ns = self.exchange.ask(services)
        replies = self.exchange.buffers.replies[services.start : services.stop]
        self.times.add("ffn", waited_ns, replies[:, BUSY_NS].max())
        num_computed, num_up = replies[:, [NUM_COMPUTED, NUM_UP]].sum(axis=0).tolist()
        self.times.count_neurons(num_computed, num_up, num_gates)
        return num_computed, num_up

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

    def _predicts(self, num_tokens: int) -> bool:
        return self.predictor is not None and num_tokens <= KERNEL_TOKENS

    def _predictor_input(self) -> str:
        """The array of the buffers that the predictor reads."""
        if self.predictor is None or self.predictor.input_name == "ffn_input":
            return "ffn_input"
        return "hidden" if self.config.layer_order.is_parallel else "mixed"


def _own_thresholds(config: ModelConfig, mode: str) -> list[Thresholds]:
    """Which neurons of each layer fire where no thresholds are given."""
    if mode == THRESHOLD:
        raise ValueError(f"the mode {mode} needs thresholds")
    alike = ALL_FIRE if mode == "dense" else not_zero(config.activation_fn)
    return [alike] * config.num_layers
