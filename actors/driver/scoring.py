"""How well a mode predicts a text: scores of one window of it, compared with the dense model's.

Windows go through kernels, in steps of few tokens: matmul rounds 16-bit weights to bfloat16, which
is more than the differences that are measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import StepMode, step_mode
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.decode.scoring import compare_logits, negative_log_likelihood
from hotcold.numba_kernels.loops.mailbox import (
    ALL_NEURONS,
    LISTED,
    NUM_IDS,
    NUM_LISTED,
    WEIGHS_BLOCKS,
)

_Score = TypeVar("_Score")
BeginStep = Callable[[int, int], None]  # of a step's first position, and the end


def has_pages(begin: int, end: int) -> None:
    """Do nothing, where a sequence has pages for all of its positions."""


@dataclass(frozen=True)
class NeuronCounts:
    """Counts of an audited run over `num_tokens` tokens.

    num_listed: neurons that the predictor chose, or all where it does not predict a layer
    num_fired: neurons that fire in truth; num_fired_listed: those of them that were chosen
    num_up: neurons whose up row was read
    Shapes:  (L,) int64 each
    """

    num_tokens: int
    num_listed: np.ndarray
    num_fired_listed: np.ndarray
    num_fired: np.ndarray
    num_up: np.ndarray

    def __add__(self, other: "NeuronCounts") -> "NeuronCounts":
        mine, others = vars(self), vars(other)
        return NeuronCounts(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True)
class WindowScores:
    """Scores of one window. Arrays are (n,), one item a scored position; float64, in nats.

    Comparisons with the dense model are None for the dense model itself; `counts` is None without
    an audit.
    """

    nll: np.ndarray
    nll_dense: np.ndarray | None = None
    kld: np.ndarray | None = None
    same_top: np.ndarray | None = None  # bool
    predicts: bool = False  # whether a predictor chose the neurons
    counts: NeuronCounts | None = None


class AuditedEngine(Engine):
    """Computes what another engine computes, then runs each layer densely to see what fires."""

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`'s mode, embedding and exchange."""
        super().__init__(
            engine.config, engine.embedding, engine.exchange, engine.topology, engine.mode
        )
        self._num_tokens = 0
        self._counts = np.zeros((4, self.config.num_layers), np.int64)

    @property
    def counts(self) -> NeuronCounts:
        """What was counted so far."""
        return NeuronCounts(self._num_tokens, *self._counts.copy())

    def _runs_ffn(self, num_tokens: int) -> bool:
        return True

    def _ffn(self, layer: int, num_tokens: int) -> None:
        """Run the FFN as the engine does, then densely, in a step of one token.

        A reply counts a neuron once a step.
        """
        if num_tokens != 1:
            raise ValueError("an audited step takes one token")
        buffers, asked = self.exchange.buffers, self._requested()
        num_ids, num_listed = buffers.requests[asked, NUM_IDS], self._num_chosen(layer)
        is_listed = bool((num_ids != ALL_NEURONS).any())
        num_fired_listed, num_up = self._request_ffn(num_listed)
        if is_listed:
            num_ids = np.where(num_ids == LISTED, buffers.replies[asked, NUM_LISTED], num_ids)
            held = self.topology.num_neurons[layer, asked]
            num_listed = int(np.where(num_ids == ALL_NEURONS, held, num_ids).sum())
        num_fired = num_fired_listed
        if is_listed:
            partials = buffers.partials[:, :num_tokens], buffers.more_partials[:, :, :num_tokens]
            chosen = [part.copy() for part in partials]
            buffers.requests[asked, NUM_IDS] = ALL_NEURONS
            num_fired, _ = self._request_ffn(self.config.ffn_sizes[layer])
            for part, kept in zip(partials, chosen, strict=True):
                part[:] = kept
        self._counts[:, layer] += (num_listed, num_fired_listed, num_fired, num_up)
        self._num_tokens += layer == 0

    def _num_chosen(self, layer: int) -> int:
        """Neurons of the blocks that the step's token uses: all where none were chosen."""
        ffn, buffers = self.config.layers[layer].ffn, self.exchange.buffers
        if not buffers.requests[self._requested()[0], WEIGHS_BLOCKS]:
            return ffn.num_neurons
        chosen = buffers.block_weights[0, : len(ffn.block_sizes)] != 0
        return int(chosen @ np.array(ffn.block_sizes))


class ThresholdTrials:
    """What thresholds cost on windows of a text; keeps the windows' dense logits."""

    def __init__(self, engine: Engine) -> None:
        """Shares the engine's exchange, whose services have the lengths of down rows."""
        self._engine = engine
        self._dense: dict[tuple[int, ...], np.ndarray] = {}

    def kld(
        self,
        ids: Sequence[int],
        first: int,
        thresholds: Sequence[Thresholds],
        begin_step: BeginStep = has_pages,
    ) -> np.ndarray:
        """KL divergence from dense at each of positions first.. but the last of a window, in nats.

        Shapes:  result (len(ids) - 1 - first,) float64
        Errors:  as of `score_window`
        """
        dense = self._dense.get((first, *ids))
        if dense is None:
            mode = step_mode(self._engine.config, "dense")
            rows = scored_rows(self._engine, mode, ids, first, begin_step=begin_step)
            dense = self._dense[(first, *ids)] = np.array([row.copy() for _, row in rows])
        mode = StepMode(THRESHOLD, thresholds)
        rows = scored_rows(self._engine, mode, ids, first, begin_step=begin_step)
        return np.array([kld for _, _, kld, _ in _comparisons(dense, rows, ids, first)])


def score_window(
    engine: Engine,
    ids: Sequence[int],
    first: int,
    audit: bool,
    begin_step: BeginStep = has_pages,
) -> WindowScores:
    """Score tokens first + 1.. of a window, each from all tokens before it, with `engine`'s mode.

    The window is sequence 0 from position 0 on; what the KV cache held of it is overwritten. Modes
    other than dense are compared with dense. `audit` counts neurons, in steps of one token.
    `begin_step` is called before each step, and may raise to end the window.
    Errors:  RequestError where logits are not finite or a service failed; ServiceError
    """
    if not 0 <= first < len(ids) - 1:
        raise RequestError(f"a window of {len(ids)} tokens has none to score after token {first}")
    dense, mode = step_mode(engine.config, "dense"), engine.mode
    dense_rows = scored_rows(engine, dense, ids, first, begin_step=begin_step)
    if mode.name == "dense":
        scores = [_score(negative_log_likelihood, at, row, ids[at + 1]) for at, row in dense_rows]
        return WindowScores(np.array(scores))
    reference = np.empty((len(ids) - 1 - first, engine.config.vocab_size), np.float32)
    for at, row in dense_rows:
        reference[at - first] = row
    audited = AuditedEngine(engine) if audit else None
    max_tokens = 1 if audit else KERNEL_TOKENS
    rows = scored_rows(audited or engine, mode, ids, first, max_tokens, begin_step)
    columns = zip(*_comparisons(reference, rows, ids, first), strict=True)
    nll_dense, nll, kld, same_top = map(np.array, columns)
    predicts = mode.predictor is not None
    counts = audited.counts if audited is not None else None
    return WindowScores(nll, nll_dense, kld, same_top, predicts, counts)


def scored_rows(
    engine: Engine,
    mode: StepMode,
    ids: Sequence[int],
    first: int,
    max_tokens: int = KERNEL_TOKENS,
    begin_step: BeginStep = has_pages,
) -> Iterator[tuple[int, np.ndarray]]:
    """Positions first.. but the last, each with its logits (V,), a view that the next step ends.

    In steps of at most `max_tokens`. Errors: as of `score_window`.
    """
    buffers = engine.exchange.buffers
    size = min(max_tokens, KERNEL_TOKENS, engine.max_tokens, buffers.logits.shape[0])
    num_run = len(ids) - 1  # nothing follows the last token
    for begin in range(0, num_run, size):
        end = min(begin + size, num_run)
        begin_step(begin, end)
        scored = range(max(begin, first), end)
        tokens, places = ids[begin:end], range(begin, end)
        logits = engine.step(tokens, places, [0] * len(places), len(scored), mode)
        yield from zip(scored, logits, strict=True)


def _comparisons(
    dense: np.ndarray, rows: Iterator[tuple[int, np.ndarray]], ids: Sequence[int], first: int
) -> list[tuple[float, float, float, bool]]:
    """Of each row `compare_logits` with its row of dense (n, V), which begins at `first`."""
    return [_score(compare_logits, at, dense[at - first], row, ids[at + 1]) for at, row in rows]


def _score(kernel: Callable[..., _Score], at: int, *arguments: Any) -> _Score:
    """A kernel's result at one position. Errors: RequestError where it refuses the logits."""
    try:
        return kernel(*arguments)
    except ValueError as problem:
        raise RequestError(
            f"token {at + 2} of this window cannot be scored: {problem}; the weights may be "
            "damaged, or a float16 KV cache too narrow for them (--kv-dtype float32)"
        ) from None
