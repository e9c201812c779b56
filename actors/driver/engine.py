"""One step of the model: token ids in, logits out, two exchanges a layer.

The order within a layer is in `numba_kernels.loops.layer_loop`, which yields to the engine for what
compiled code cannot do. A step may be run layer by layer: `place`, then `run_layer` for each, then
`logits`.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np

from hotcold.actors.driver.modes import StepMode
from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.protocol.failures import AnswerFailed, NotFiniteError
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS, MATRIX_TOKENS, cut_tokens
from hotcold.actors.protocol.stripes import MOST_KEPT, num_kept, sum_order, sums_of_services
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.telemetry.experts import new_block_counts
from hotcold.actors.telemetry.step_times import StepTimes
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.finite import finite_rows
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.loops import layer_loop
from hotcold.numba_kernels.loops.layer_loop import (
    ALONE,
    FIRST,
    SECOND,
    LayerFacts,
    begin_layers,
    new_layer_state,
    requested_services,
    run_layers,
)
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    BUSY_NS,
    BYTES_READ,
    LAYER,
    NEXT_LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PARTS_USEFUL,
    ROUND,
    SEND,
    STREAM,
    TARGET,
    SharedBuffers,
)
from hotcold.numba_kernels.loops.predict_team import FFN_RESIDUAL, HIDDEN

_UNSHARED_STEPS = 256  # after services gave up layers that they shared
_UNKNOWN = -1  # how many upload rounds there are, before the first


class Engine:
    """Runs attention, the FFN's partial outputs and their sum, layer by layer, then the head."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: EmbeddingWeights,
        exchange: Exchange,
        topology: Topology,
        mode: StepMode,
    ) -> None:
        """`mode` is of steps that are told no other."""
        self.config = config
        self.exchange = exchange
        self.mode = mode
        self.max_tokens = exchange.buffers.hidden.shape[0]
        self.kernel_tokens = min(KERNEL_TOKENS, self.max_tokens)  # of any sequences
        self.embedding = embedding
        # Called before services compute by matmul, which they may not have loaded yet: the first
        # waits at most so many seconds and says whether they have, the second until they have.
        self.begin_matmul: Callable[[float], bool] = lambda wait_s: True
        self.prepare_matmul: Callable[[], None] = lambda: None
        self.joins_layers = True  # those that a GPU has as a whole, in steps of few tokens
        self.shares_layers = True  # and those that it shares with CPU services
        self._unshared_steps = 0  # that are left after services gave up
        self.chunks_at_once = 1  # of a long prompt go through each layer together
        self.neuron_upload_tokens = 0  # prompts this long have all neurons uploaded to a GPU
        self.block_counts = new_block_counts(config)  # of a mixture, as in `LayerFacts`
        self.use_services(topology)
        self._last_keys = max(
            number for number, layer in enumerate(config.layers) if layer.attention.has_keys
        )
        self._is_routed = np.array([layer.ffn.router is not None for layer in config.layers])
        self.times = StepTimes()
        self.num_steps = 0  # with the model's own weights: a draft's are not counted
        self._reads = np.zeros((0, 0), np.int64)  # what services had read before this step
        self._layer_state = new_layer_state()
        self._was_finite: bool | None = None  # the token of `is_sound`, at the first time

    def use_services(self, topology: Topology) -> None:
        """Use the services that the exchange has now."""
        config = self.config
        self.topology = topology
        self.cut_tokens = cut_tokens(self.max_tokens, topology.has_gpu)  # of prompts, multiples
        ffn_of, num_ffn = topology.ffn_lists
        sums = sums_of_services(topology.parts, config.ffn_bias)
        self._facts = LayerFacts(
            attention_of=topology.attention_of,
            ffn_of=ffn_of,
            num_ffn=num_ffn,
            is_chained=topology.is_chained,
            num_neurons=_block_neurons(config, topology),
            cpu_services=np.array(topology.cpu_services, np.int64),
            output_norm=self.embedding.ffn_output_norm,
            norm_kind=norm_kind(config.norm_kind),
            norm_epsilon=np.float32(config.norm_eps),
            residual_scale=np.float32(config.residual_scale),
            residual=HIDDEN if config.layers[0].order.is_parallel else FFN_RESIDUAL,
            block_counts=self.block_counts,
            sums=sums,
            head=np.array([topology.head], np.int64),
            end_of_whole=_ends(topology, topology.is_whole),
            end_of_shared=_ends(topology, self._shared(topology, sums)),
            sharing=np.array(topology.sharing, np.int64),
            gpu_predicts=topology.gpu_predicts,
            joins_head=topology.joins_head,
            pair_norm=self.embedding.pair_norm,
            pairs=_pairs(config),
        )

    def _shared(self, topology: Topology, sums: np.ndarray) -> np.ndarray:
        """Which layers services may share, (L,) bool, to which it says how to add up."""
        buffers = self.exchange.buffers
        order = sum_order(topology.parts, sums, 1 + buffers.more_partials.shape[1])
        is_short = order.size < buffers.sum_order.size and num_kept(order) <= MOST_KEPT
        buffers.sum_order[: order.size if is_short else 1] = order if is_short else 0
        if topology.gpu_predicts.any():
            _write_cold(buffers, topology.shards)
        return topology.is_shared if is_short else topology.is_whole

    def step(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        num_logits: int = 1,
        mode: StepMode | None = None,
    ) -> np.ndarray:
        """Run tokens through the model; returns logits of the last `num_logits` of them.

        `mode` says which neurons are computed, the engine's where it is None. Token t stands at
        positions[t] of sequence slots[t], whose earlier positions are in the KV cache or earlier
        in this step. More tokens than a kernel takes must be one sequence's. The same step may be
        run again, whatever it ended with.
        Shapes:  token_ids, positions, slots (T,), T <= max_tokens; result (num_logits, V) float32,
                 a view that the next step overwrites
        Errors:  ServiceError if a service died or hangs, RequestError if one failed,
                 NotFiniteError if numbers are not finite
        """
        num_tokens = len(token_ids)
        with self.times.step(num_tokens):
            self.place(token_ids, positions, slots)
            mode = mode or self.mode
            layers = range(self.config.num_layers)
            joins = self.joins_layers and num_tokens <= self.kernel_tokens
            shares = self.shares_layers and not self._unshared_steps
            try:
                self._run_layers(
                    layers, num_tokens, mode, num_logits=num_logits, joins=joins, shares=shares
                )
            except AnswerFailed:
                self._layer_state[layer_loop.SHARES] = False
                raise
            finally:
                if joins and shares and not self._layer_state[layer_loop.SHARES]:
                    self._unshared_steps = _UNSHARED_STEPS
                self._unshared_steps = max(0, self._unshared_steps - 1)
            self.num_steps += mode.weights == TARGET
            self._count_reads()
            return self.exchange.buffers.logits[:num_logits]

    def is_sound(self, slot: int) -> bool:
        """Compute a token as the first one of a sequence: whether that goes as at the first time.

        False where it comes to a NaN, and did not then. Errors: RequestError of a service that
        fails; ServiceError
        """
        try:
            self.step([0], [0], [slot])
            is_finite = True
        except NotFiniteError:
            is_finite = False
        if self._was_finite is None:
            self._was_finite = is_finite
        return is_finite or not self._was_finite

    def compile(self) -> None:
        """Compile what steps need here, by a step of no layers: nothing is asked of services."""
        self._run_layers(range(0), 1, self.mode)
        finite_rows(self.exchange.buffers.hidden, 0)

    def _count_reads(self) -> None:
        """Count what services have read from storage since the last step."""
        replies = self.exchange.buffers.replies
        if not replies[:, BYTES_READ].any():
            return
        found = replies[self.topology.cpu_services, BYTES_READ : PARTS_USEFUL + 1]
        before = self._reads if self._reads.shape == found.shape else np.zeros_like(found)
        grown = np.where(found >= before, found - before, found)  # a new process counts from 0
        self._reads = found
        num_bytes, _, *parts = grown.sum(axis=0).tolist()
        self.times.count_reads([num_bytes, int(grown[:, 1].max()), *parts])

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
        ids, own = np.asarray(token_ids, np.int64), buffers.layer_embeddings
        buffers.hidden[:num_tokens] = self.embedding.lookup(ids, np.asarray(positions, np.int64))
        if own.shape[1]:
            scale = np.float32(buffers.hidden.shape[1] ** -0.5)
            np.multiply(buffers.hidden[:num_tokens], scale, out=buffers.embedded[:num_tokens])
            own[:num_tokens] = self.embedding.lookup_per_layer(ids)
        for rows in (buffers.hidden, own):
            if rows.shape[1] and not finite_rows(rows, num_tokens):
                bad = _bad_rows(rows[:num_tokens])
                raise _not_finite(buffers, "in its token embeddings", bad, None)

    def _multiplies(self, num_tokens: int) -> bool:
        """Whether services compute such a step by matmul."""
        return num_tokens >= MATRIX_TOKENS

    def run_layer(
        self, layer: int, num_tokens: int, next_layer: int, num_wanted: int | None = None
    ) -> None:
        """Run the tokens that were placed through one layer.

        `next_layer`, an index or the number of layers, will be run next, of any tokens. Between
        layers what `place` wrote and `hidden` matter, and `ffn_residual` between two FFNs. From the
        last layer on that has keys and values of its own the output is wanted for the last
        `num_wanted` tokens alone, where it is given: of the others, which have no logits, only keys
        and values go on to later tokens.
        Errors:  those of `step`
        """
        num_unwanted, num_layers = 0, self.config.num_layers
        if layer >= self._last_keys and num_wanted is not None and not self.topology.has_gpu:
            num_unwanted = num_tokens - num_wanted
        if layer > self._last_keys and num_unwanted == num_tokens:
            return
        is_known = next_layer < num_layers
        requests, cpus = self.exchange.buffers.requests, self.topology.cpu_services
        requests[cpus, NEXT_LAYER] = next_layer + 1 if is_known else 0
        self._run_layers(range(layer, layer + 1), num_tokens, self.mode, num_unwanted)

    def _run_layers(
        self,
        layers: range,
        num_tokens: int,
        mode: StepMode,
        num_unwanted: int = 0,
        num_logits: int = 0,
        joins: bool = False,
        shares: bool = False,
    ) -> None:
        layer_state, exchange = self._layer_state, self.exchange
        selector = mode.selector(self._is_routed)
        own_ffn = self._runs_ffn(num_tokens)
        begin_layers(
            layer_state, layers, num_tokens, own_ffn, mode.weights, num_unwanted, num_logits, joins,
            shares,
        )  # fmt: skip
        while True:
            layer_state[layer_loop.NEXT_NUMBER] = exchange.next_number
            reason = run_layers(
                layer_state, exchange.request_state, exchange.buffers, self._facts, selector
            )
            if reason == layer_loop.DONE:
                break
            self._continue(reason, int(layer_state[layer_loop.AT_LAYER]), num_tokens)
        self.times.add_layers(layer_state)

    def _continue(self, reason: int, layer: int, num_tokens: int) -> None:
        """Do what the layer loop yielded for."""
        layer_state, exchange = self._layer_state, self.exchange
        if reason == layer_loop.SEND_REQUESTS:
            layer_state[layer_loop.REQUEST_WAITED_NS] = exchange.request(self._requested())
        elif reason == layer_loop.RESUME:
            layer_state[layer_loop.REQUEST_WAITED_NS] += exchange.await_replies(self._requested())
        elif reason == layer_loop.COMPUTE:
            self._ffn(layer, num_tokens)
        elif layer == self.config.num_layers:
            raise self._bad_logits(num_tokens)
        else:
            attention = int(self.topology.attention_of[layer])
            rows = slice(int(layer_state[layer_loop.UNWANTED]), num_tokens)
            raise _bad_layer(exchange.buffers, layer, rows, attention, self._requested())

    def _requested(self) -> list[int]:
        """The services that the layer loop sends requests to."""
        found: list[int] = requested_services.py_func(self._layer_state, self._facts).tolist()
        return found

    def logits(self, num_tokens: int, num_logits: int) -> np.ndarray:
        """Logits of the last `num_logits` tokens after the last layer; as in `step`."""
        end = self.config.num_layers
        self._run_layers(range(end, end), num_tokens, self.mode, num_logits=num_logits)
        return self.exchange.buffers.logits[:num_logits]

    def _bad_logits(self, num_tokens: int) -> NotFiniteError:
        """The error of a step whose logits are not finite."""
        buffers, num_logits = self.exchange.buffers, int(self._layer_state[layer_loop.NUM_LOGITS])
        bad = np.zeros(num_tokens, bool)
        bad[num_tokens - num_logits :] = _bad_rows(buffers.logits[:num_logits])
        return _not_finite(buffers, "in its logits", bad, self.topology.head)

    def _runs_ffn(self, num_tokens: int) -> bool:
        """Whether `_ffn` runs the FFN of such steps, instead of the layer loop."""
        least = self.neuron_upload_tokens
        return bool(least) and num_tokens >= max(least, MATRIX_TOKENS)

    def _ffn(self, layer: int, num_tokens: int) -> None:
        """Let the partial outputs of `_requested` be the FFN's; the request words are written."""
        num_neurons = self.config.ffn_sizes[layer]
        if self.topology.num_hot[layer] == num_neurons:
            self._request_ffn(num_neurons)
            return
        self._upload_ffn(layer, num_tokens)
        self.times.count_neurons(*[num_neurons] * 3)
        self._layer_state[layer_loop.REQUESTED] = ATTENTION  # whose partial output is the sum

    def _request_ffn(self, num_gates: int) -> tuple[int, int]:
        """Send `_requested` their requests; returns num_computed, num_up of their replies."""
        services = self._requested()
        waited_ns = self.exchange.request(services)
        replies = self.exchange.buffers.replies[services]
        self.times.add("ffn", waited_ns, replies[:, BUSY_NS].max())
        num_computed, num_up = replies[:, [NUM_COMPUTED, NUM_UP]].sum(axis=0).tolist()
        self.times.count_neurons(num_computed, num_up, num_gates)
        return num_computed, num_up

    def _upload_ffn(self, layer: int, num_tokens: int) -> None:
        """Compute the whole FFN in the layer's attention service, all neurons uploaded to its GPU.

        In each round the CPU services copy the next neurons into the arena, while the GPU service
        takes those of the round before from the other place. A round may be requested again: the
        GPU service does not add twice what it has added.
        """
        buffers, cpus = self.exchange.buffers, self.topology.cpu_services
        gpu, requests = int(self.topology.attention_of[layer]), buffers.requests
        services = [gpu, *cpus]
        requests[services, LAYER], requests[services, NUM_TOKENS] = layer, num_tokens
        requests[gpu, OPERATION], requests[cpus, OPERATION] = STREAM, SEND
        number, num_rounds = 0, _UNKNOWN
        while num_rounds == _UNKNOWN or number <= num_rounds:
            requests[services, ROUND], requests[gpu, NUM_IDS] = number, num_rounds
            requested = services if number != num_rounds else [gpu]
            waited_ns = self.exchange.request(requested)
            self.times.add("ffn", waited_ns, buffers.replies[requested, BUSY_NS].max())
            if num_rounds == _UNKNOWN:
                num_rounds = int(buffers.replies[cpus, NUM_COMPUTED].max())
            number += 1


def _pairs(config: ModelConfig) -> np.ndarray:
    """`pairs` of `LayerFacts`: (L,) int64."""
    orders = (layer.order for layer in config.layers)
    of_orders = {(True, False): FIRST, (False, True): SECOND, (False, False): ALONE}
    return np.array([of_orders[one.begins_pair, one.ends_pair] for one in orders], np.int64)


def _block_neurons(config: ModelConfig, topology: Topology) -> np.ndarray:
    """How many neurons of each block of a layer each service holds: (L, S, B) int64."""
    blocks, num_blocks = neurons.blocks(config), neurons.most_blocks(config)
    found = np.zeros((config.num_layers, len(topology.parts), num_blocks), np.int64)
    for service, part in enumerate(topology.parts):
        for layer, ids in enumerate(part.neuron_ids or []):
            found[layer, service] = np.bincount(blocks[layer, ids], minlength=num_blocks)
    return found


def _write_cold(buffers: SharedBuffers, shards: Sequence[Sequence[np.ndarray]]) -> None:
    """Tell the GPU the CPU services' neurons of each layer, in predictors' order."""
    for layer, of_services in enumerate(zip(*shards, strict=True)):
        ids = np.concatenate(of_services)
        buffers.cold_ids[layer, : ids.size] = ids
        buffers.cold_bounds[layer, : len(of_services)] = np.cumsum(
            [own.size for own in of_services]
        )
    told = crc32(buffers.cold_bounds.tobytes(), crc32(buffers.cold_ids.tobytes()))
    buffers.sum_order[-1] = told >> 1 | 1  # 0: nothing was told yet


def _ends(topology: Topology, joins: np.ndarray) -> np.ndarray:
    """Where layers end that can be one request to a layer's attention service: (L,) int64.

    `joins` (L,): which layers may.
    """
    ends, attention_of = np.arange(joins.size), topology.attention_of
    for layer in reversed(np.flatnonzero(joins)):
        is_followed = attention_of[layer : layer + 2].tolist() == [attention_of[layer]] * 2
        ends[layer] = ends[layer + 1] if is_followed else layer + 1
    return ends


def _bad_layer(
    buffers: SharedBuffers, layer: int, rows: slice, attention: int, services: Sequence[int]
) -> NotFiniteError:
    """The error of a layer with finite input whose FFN input or output is not finite.

    It names the service that made the first NaN: `attention`, or one of `services`, whose partial
    outputs were added: to those of services before them, so the last one has its own. `rows` are of
    the tokens whose output was wanted.
    """
    bad = _bad_rows(buffers.ffn_residual[rows]) | _bad_rows(buffers.ffn_input[rows])
    guilty = attention if bad.any() else None
    for service in reversed(services):
        bad_partial = _bad_rows(buffers.partials[service, rows])
        for more in buffers.more_partials[service]:
            bad_partial |= _bad_rows(more[rows])
        if guilty is None and bad_partial.any():
            guilty = service
        bad |= bad_partial
    bad |= _bad_rows(buffers.hidden[rows])
    of_step = np.zeros(rows.stop, bool)
    of_step[rows] = bad
    return _not_finite(buffers, f"in layer {layer}", of_step, guilty)


def _bad_rows(values: np.ndarray) -> np.ndarray:
    """Which rows are not finite: (T,) bool."""
    bad: np.ndarray = ~np.isfinite(values).all(axis=1)
    return bad


def _not_finite(
    buffers: SharedBuffers, where: str, bad: np.ndarray, guilty: int | None
) -> NotFiniteError:
    slots = buffers.slots[: bad.size][bad]
    return NotFiniteError(where, frozenset(slots.tolist()), guilty)
