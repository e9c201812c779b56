"""Which neurons fire on a text: how often each does, and on which inputs."""

import numpy as np

from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import step_mode
from hotcold.actors.driver.scoring import BeginStep, has_pages
from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.topology import Topology
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.loops.mailbox import COUNT_FFN, OPERATION, WEIGHS_BLOCKS
from hotcold.placement.expert_reuse import StackDistances


class ProfilingEngine(Engine):
    """An engine whose services count which neurons fire, for all neurons of every layer."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: EmbeddingWeights,
        exchange: Exchange,
        topology: Topology,
        bos_id: int | None,
    ) -> None:
        """Shares the exchange with the engine of requests; the two take turns.

        `bos_id` stands before each window, where texts of this model begin with one.
        """
        super().__init__(config, embedding, exchange, topology, step_mode(config, "dense"))
        self._bos_id = bos_id
        self.num_bos = 0 if bos_id is None else 1
        # Of all counted tokens those that have chosen a block of neurons; one block has all.
        self.chosen_counts = np.zeros((config.num_layers, neurons.most_blocks(config)), np.int64)
        self.distances = StackDistances(config.num_experts)
        self._routes: list[np.ndarray] = []  # of the step, by layers with a router: (T, E) bool
        self._counts = False
        self._rows = np.zeros(0, np.int64)  # of the step's tokens, those to be recorded
        self._inputs: np.ndarray = np.zeros((0, 0, 0), np.uint16)
        # What each block weighs for the last window's recorded tokens: (L, R, B), 0 is not chosen.
        self.recorded_weights: np.ndarray = np.zeros((0, 0, 0), np.float32)
        self._num_recorded = 0  # in earlier steps of the window

    def profile_window(
        self,
        ids: list[int],
        recorded: list[int],
        num_prompt: int | None = None,
        begin_step: BeginStep = has_pages,
    ) -> np.ndarray:
        """Run `ids` from position 0 of slot 0; return the FFN inputs of the tokens `recorded`.

        The bos token stands before the ids but is not counted: its activations are unlike any
        other's, and every window would add one. With `num_prompt` the ids after so many are the
        model's own answer, and `distances` counts how soon it chooses experts again; a prompt uses
        its experts in one step. `begin_step` gets each step's first position and end; it may raise.
        Shapes:  recorded: ascending indices into ids; result (L, len(recorded), d)
        Dtypes:  result uint16, float16 bits
        Errors:  RequestError if a service failed or the model's numbers are not finite: a NaN
                 would count as fired; ServiceError
        """
        config = self.config
        chosen = np.asarray(recorded, np.int64)
        self._inputs = np.zeros((config.num_layers, chosen.size, config.hidden_size), np.uint16)
        blocks = config.num_layers, chosen.size, neurons.most_blocks(config)
        self.recorded_weights = np.zeros(blocks, np.float32)
        self._num_recorded = 0
        if self._bos_id is not None:
            self._counts = False
            begin_step(0, 1)
            self.step([self._bos_id], [0], [0], num_logits=0)
        self._counts, routes = True, []
        for first in range(0, len(ids), self.max_tokens):
            last = min(first + self.max_tokens, len(ids))
            positions = range(self.num_bos + first, self.num_bos + last)
            begin_step(positions.start, positions.stop)
            self._rows = chosen[(chosen >= first) & (chosen < last)] - first
            self._routes = []
            self.step(ids[first:last], positions, [0] * (last - first), num_logits=0)
            if self._routes and num_prompt is not None:
                routes.append(np.stack(self._routes, axis=1))
            self._num_recorded += self._rows.size
        if routes:
            chosen = np.concatenate(routes)
            self.distances.add(np.logical_or.reduce(chosen[:num_prompt])[None], counts=False)
            self.distances.add(chosen[num_prompt:])
        inputs, self._inputs = self._inputs, self._inputs[:, :0]
        return inputs

    def _multiplies(self, num_tokens: int) -> bool:
        return self._counts or super()._multiplies(num_tokens)

    def _runs_ffn(self, num_tokens: int) -> bool:
        return self._counts or super()._runs_ffn(num_tokens)

    def _ffn(self, layer: int, num_tokens: int) -> None:
        if not self._counts:
            super()._ffn(layer, num_tokens)
            return
        buffers = self.exchange.buffers
        services, num_blocks = self._requested(), len(self.config.layers[layer].ffn.block_sizes)
        weights = np.ones((num_tokens, num_blocks), np.float32)
        if buffers.requests[services[0], WEIGHS_BLOCKS]:
            weights = buffers.block_weights[:num_tokens, :num_blocks].copy()
        if self._rows.size:
            recorded = slice(self._num_recorded, self._num_recorded + self._rows.size)
            inputs = buffers.ffn_input[self._rows]
            self._inputs[layer, recorded] = as_float16_bits(inputs)
            self.recorded_weights[layer, recorded, :num_blocks] = weights[self._rows]
        buffers.requests[services, OPERATION] = COUNT_FFN
        self._request_ffn(self.config.ffn_sizes[layer])
        self.chosen_counts[layer, :num_blocks] += np.count_nonzero(weights, axis=0)
        if (router := self.config.layers[layer].ffn.router) is not None:
            self._routes.append(weights[:, : router.num_experts] != 0)


def as_float16_bits(values: np.ndarray) -> np.ndarray:
    """float32 as float16 bits, clipped to float16's range.

    Beyond 65504 it would be infinite, and one such number makes a whole training run NaN.
    """
    most = np.finfo(np.float16).max
    return np.clip(values, -most, most).astype(np.float16).view(np.uint16)


def counts_by_neuron(
    config: ModelConfig, specs: list[ServiceSpec], counts: list[np.ndarray]
) -> np.ndarray:
    """Services' counts in the checkpoint's order of neurons.

    counts[s] follows specs[s].neuron_ids layer by layer.
    Shapes:  result (L, N), N of the largest layer
    Dtypes:  int64
    """
    result = np.zeros(neurons.shape(config), np.int64)
    for spec, found in zip(specs, counts, strict=True):
        first = 0
        for layer, ids in enumerate(spec.neuron_ids or []):
            result[layer, ids] = found[first : first + len(ids)]
            first += len(ids)
    return result
