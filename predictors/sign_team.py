"""Sign predictors computed by several threads of the driver's process."""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.ir.bit_ir import INPUT_PLANES
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, ring
from hotcold.numba_kernels.serve.mailbox import DONE, SharedBuffers, cell
from hotcold.numba_kernels.serve.predict_team import (
    FFN_INPUT,
    HIDDEN,
    MIXED,
    NUM_DOORS,
    NUM_TASK_WORDS,
    STOP,
    PredictTeam,
    SignPredictors,
    TeamWork,
    bit_rows,
    help_predict,
    score_task,
    write_task,
)
from hotcold.numba_kernels.serve.work_stealing import new_block_counters
from hotcold.predictors.sign import SignLayer

_NO_REQUEST = -1  # no request has this number, so no thread sleeps on it
NOWHERE = np.zeros(0, np.uint64)
INPUTS = {"ffn_input": FFN_INPUT, "mixed": MIXED, "hidden": HIDDEN}


class SignTeam:
    """Threads that score a layer's neurons together; see `numba_kernels.serve.predict_team`.

    The driver is one of them: it announces a task, sends the service the request whose reply is the
    input, and scores with the others when the reply is there.
    """

    def __init__(
        self,
        layers: Sequence[SignLayer | None],
        buffers: SharedBuffers,
        service: int,
        num_threads: int,
        max_tokens: int,
        bounds: np.ndarray,
    ) -> None:
        """Start num_threads - 1 helpers, which wake when `service` of the buffers replies.

        Weight bits go into the buffers where they fit. bounds: as in `PredictTeam`
        """
        self._predictors = stacked(layers, buffers.predictor_bits)
        self._buffers = buffers
        self._service = service
        self._num_threads = num_threads
        max_neurons = max(layer.num_neurons for layer in layers if layer is not None)
        words = -(-self._predictors.centers.shape[1] // 64)
        self._work = TeamWork(
            task=np.zeros(NUM_TASK_WORDS, np.int64),
            doors=np.zeros(NUM_DOORS * INTS_A_CELL, np.int32),
            scores=np.empty((max_tokens, max_neurons), np.float32),
            planes=np.empty((num_threads, INPUT_PLANES, words), np.uint64),
            counters=new_block_counters(max_tokens, num_threads),
        )
        # For the compiled layer loop, which announces and scores itself.
        self.compiled = PredictTeam(num_threads, self._predictors, self._work, bounds)
        seen = self._last_reply()
        shared = (buffers, self._predictors, self._work)
        self._work.task[STOP] = 1
        help_predict(0, num_threads, service, _NO_REQUEST, *shared)  # compiled here, if at all
        self._work.task[STOP] = 0
        self._helpers = [
            threading.Thread(
                target=help_predict,
                args=(i, num_threads, service, seen, *shared),
                name=f"predictor-{i}",
                daemon=True,
            )
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def layers(self) -> list[SignLayer | None]:
        """The layers' predictors, as views of the team's arrays."""
        predictors, offsets = self._predictors, self._predictors.offsets
        found: list[SignLayer | None] = []
        for i, (center, scale) in enumerate(zip(*predictors[-2:], strict=True)):
            part = predictors.thresholds[offsets[i] : offsets[i + 1]]
            rows = bit_rows(predictors, i)
            found.append(SignLayer(rows, part, center, scale) if part.size else None)
        return found

    def announce(self, layer: int, num_tokens: int, input_name: str, number: int) -> None:
        """Say what to score when the service replies to request `number`.

        input_name: the buffer that holds the input, "ffn_input", "mixed" or "hidden"
        """
        write_task(self.compiled, layer, num_tokens, INPUTS[input_name], number)

    def score(self, layer: int, num_tokens: int) -> np.ndarray | None:
        """Return the layer's scores (T, N) float32, which the next call overwrites.

        None unless it was announced for the request that the service replied to last.
        """
        if not score_task(self.compiled, layer, num_tokens, self._buffers, self._service):
            return None
        count = self._predictors.offsets[layer + 1] - self._predictors.offsets[layer]
        return self._work.scores[:num_tokens, :count]

    def close(self) -> None:
        """End the helpers, after the service's last request."""
        self._work.task[STOP] = 1
        number = self._last_reply()
        ring(self._buffers.cells, cell(self._service, DONE), np.int32(_NO_REQUEST))
        for helper in self._helpers:
            helper.join()
        self._buffers.cells[cell(self._service, DONE) * INTS_A_CELL] = number

    def _last_reply(self) -> int:
        """The number of the request that the service replied to last."""
        return int(self._buffers.cells[cell(self._service, DONE) * INTS_A_CELL])


def stacked(layers: Sequence[SignLayer | None], into: np.ndarray = NOWHERE) -> SignPredictors:
    """Return all layers' arrays one after the other; without a predictor a layer has no neurons.

    Bits are written to `into` (words,) uint64 where they fit.
    """
    known = [layer for layer in layers if layer is not None]
    counts = [0 if layer is None else layer.num_neurons for layer in layers]
    row_words = np.array([0 if layer is None else layer.bits.shape[1] for layer in layers])
    width = known[0].center.size
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    starts, num_words = bit_starts(counts, row_words)
    bits = into if into.size >= num_words else aligned_empty((num_words,), np.uint64)
    thresholds = np.empty(offsets[-1], np.float32)
    centers, scales = (np.zeros((len(layers), width), np.float32) for _ in range(2))
    for i, layer in enumerate(layers):
        if layer is not None:
            bits[starts[i] : starts[i] + layer.bits.size] = layer.bits.reshape(-1)
            thresholds[offsets[i] : offsets[i + 1]] = layer.thresholds
            centers[i], scales[i] = layer.center, layer.scale
    return SignPredictors(offsets, starts, row_words, bits, thresholds, centers, scales)


def bit_starts(counts: ArrayLike, row_words: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where each layer's rows begin, counts[l] of row_words[l] words, and the total."""
    ends = np.cumsum(np.asarray(counts, np.int64) * row_words)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return starts, int(ends[-1])
