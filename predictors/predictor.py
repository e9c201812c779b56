"""The predictors of a system: which of a layer's neurons will fire, before they are computed."""

import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hotcold.numba_kernels.decode.selection import MASK_TOKENS
from hotcold.numba_kernels.ir.bit_ir import INPUT_PLANES
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, ring
from hotcold.numba_kernels.loops.mailbox import DONE, SharedBuffers, cell_index
from hotcold.numba_kernels.loops.predict_team import (
    NUM_DOORS,
    NUM_TASK_WORDS,
    STOP,
    LowRankPredictors,
    NoPredictors,
    PredictTeam,
    TeamWork,
    help_predict,
    num_scored,
)
from hotcold.numba_kernels.loops.selector import Selector
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.stacked import (
    NOWHERE,
    AnyLayer,
    lowrank_layer,
    sign_layer,
    stacked_lowrank,
    stacked_signs,
)

PredictorInput = Literal["ffn_input", "residual"]

_NO_REQUEST = -1  # no request has this number, so no thread sleeps on it


class NeuronPredictor:
    """The predictors of all layers, for neurons divided among services, and threads that score.

    The driver is one of these threads: in the layer loop it announces a task, sends the service
    the request whose reply is the input, and scores with the others when the reply is there.
    """

    def __init__(
        self,
        layers: list[AnyLayer | None],
        shard_sizes: np.ndarray,
        input_name: PredictorInput,
        bits: np.ndarray = NOWHERE,
    ) -> None:
        """layers[l] is None where all neurons of layer l are computed; the list is emptied.

        shard_sizes[l, s] is the number of layer l's neurons in CPU service s; the predictors have
        them in that order. `input_name`: the FFN's input, or the residual stream before its norm.
        bits (words,) uint64: where sign predictors' bits are put if they fit
        """
        self.input_name = input_name
        most_neurons = max(0 if one is None else one.num_neurons for one in layers)
        most_hidden = max(getattr(one, "hidden_size", 0) for one in layers)
        lowrank: LowRankPredictors | NoPredictors = NoPredictors(
            np.zeros(len(layers) + 1, np.int64)
        )
        if any(isinstance(layer, LowRankLayer) for layer in layers):
            lowrank = stacked_lowrank(layers)
        signs = stacked_signs(layers, bits)
        work = TeamWork(
            task=np.zeros(NUM_TASK_WORDS, np.int64),
            doors=np.zeros(NUM_DOORS * INTS_A_CELL, np.int32),
            scores=np.empty((MASK_TOKENS, most_neurons), np.float32),
            hidden=np.empty(MASK_TOKENS * most_hidden, np.float32),
            planes=np.empty((0, INPUT_PLANES, -(-signs.centers.shape[1] // 64)), np.uint64),
            counters=np.zeros((0, 0), np.int32),
        )
        self._team = _of_threads(PredictTeam(1, 0, signs, lowrank, work), 0, 1)
        zeros = np.zeros((len(layers), 1), np.int64)
        bounds = np.concatenate([zeros, np.cumsum(shard_sizes, axis=1)], axis=1)
        self._bounds = np.ascontiguousarray(bounds)  # one type for compiled code
        self._cells = np.zeros(0, np.int32)  # where helpers sleep
        self._helpers: list[threading.Thread] = []

    def selector(self, thresholds: np.ndarray, is_routed: np.ndarray) -> Selector:
        """The selector of steps, scored by these threads; as in `Selector`."""
        return Selector(
            thresholds=thresholds,
            is_routed=is_routed,
            team=self._team,
            reads_residual=self.input_name == "residual",
            bounds=self._bounds,
        )

    def layer(self, layer: int) -> AnyLayer | None:
        """A layer's predictor, in the order of the services' shards, as views."""
        if num_scored(self._team.signs, layer):
            return sign_layer(self._team.signs, layer)
        lowrank = self._team.lowrank
        if isinstance(lowrank, LowRankPredictors) and num_scored(lowrank, layer):
            return lowrank_layer(lowrank, layer)
        return None

    def rearranged(
        self,
        before: Sequence[Sequence[np.ndarray]],
        shards: Sequence[Sequence[np.ndarray]],
        bits: np.ndarray = NOWHERE,
    ) -> "NeuronPredictor":
        """Return the predictors for services s with the neurons shards[s][l], in that order.

        before[s][l]: the same neurons in this predictor's order.
        """
        sizes = np.array([[ids.size for ids in shard] for shard in shards], np.int64).T
        layers: list[AnyLayer | None] = []
        for i in range(len(sizes)):
            old, new = (np.concatenate([shard[i] for shard in s]) for s in (before, shards))
            by_id = np.argsort(old)
            rows = by_id[np.searchsorted(old, new, sorter=by_id)]
            layer = self.layer(i)
            layers.append(None if layer is None else layer.arranged(rows))
        return NeuronPredictor(layers, sizes, self.input_name, bits)

    def start_helpers(self, buffers: SharedBuffers, service: int, num_threads: int) -> None:
        """Start num_threads - 1 threads, which wake when `service`, with attention, replies.

        `buffers` must be shared with that service. Call `close` at the end.
        """
        self._team, self._cells = _of_threads(self._team, service, num_threads), buffers.cells
        seen, task = self._last_reply(), self._team.work.task
        task[STOP] = 1
        help_predict(0, _NO_REQUEST, buffers, self._team)  # compiled here, if at all
        task[STOP] = 0
        self._helpers = [
            threading.Thread(
                target=help_predict,
                args=(i, seen, buffers, self._team),
                name=f"predictor-{i}",
                daemon=True,
            )
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def close(self) -> None:
        """End the helpers, after the service's last request."""
        if not self._helpers:
            return
        self._team.work.task[STOP] = 1
        number, service = self._last_reply(), self._team.service
        ring(self._cells, cell_index(service, DONE), np.int32(_NO_REQUEST))
        for helper in self._helpers:
            helper.join()
        self._helpers = []
        self._cells[cell_index(service, DONE) * INTS_A_CELL] = number

    def _last_reply(self) -> int:
        """The number of the request that the service replied to last."""
        return int(self._cells[cell_index(self._team.service, DONE) * INTS_A_CELL])


def _of_threads(team: PredictTeam, service: int, num_threads: int) -> PredictTeam:
    """The team with work space for as many threads, helpers at the bell of `service`."""
    work = team.work._replace(
        planes=np.empty((num_threads, *team.work.planes.shape[1:]), np.uint64),
        counters=new_block_counters(MASK_TOKENS, num_threads),
    )
    return team._replace(num_threads=num_threads, service=service, work=work)
