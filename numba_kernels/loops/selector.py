"""The selector: which neurons of a layer a step requests, in one compiled call.

For each layer these are all neurons of the layer, those that a predictor expects to fire, those of
the blocks that a router has chosen for each token, or what a predictor expects among them.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.predict import select_kernel
from hotcold.numba_kernels.loops.mailbox import ALL_NEURONS, NUM_IDS, WEIGHS_BLOCKS
from hotcold.numba_kernels.loops.predict_team import (
    FFN_INPUT,
    PredictTeam,
    num_scored,
    score_task,
    write_task,
)


class Selector(NamedTuple):
    """Which neurons of each layer a step computes; L layers.

    thresholds (L, 2) int64: `threshold_words`; is_routed (L,) bool: whether the attention service
    writes `block_weights` for the layer; team: scores the layers that have a predictor, of as many
    tokens as it has space for, more tokens request all neurons; None where no layer has one, so
    that compiled code has nothing of theirs; reads_residual: whether predictors read the residual
    stream, and not the FFN's input; bounds (L, C + 1) int64: the c-th CPU service has the scored
    neurons bounds[l, c]:bounds[l, c + 1] of layer l
    """

    thresholds: np.ndarray
    is_routed: np.ndarray
    team: PredictTeam | None
    reads_residual: bool
    bounds: np.ndarray


def all_neurons(thresholds: np.ndarray, is_routed: np.ndarray) -> Selector:
    """The selector of steps without predictors; as in `Selector`."""
    return Selector(thresholds, is_routed, None, False, np.zeros((len(thresholds), 1), np.int64))


@njit(nogil=True, cache=True)
def predicts(selector, layer, num_tokens):
    """Whether a predictor chooses the layer's neurons in a step of so many tokens."""
    return _predicts(selector.team, layer, num_tokens)


@njit(nogil=True, cache=True)
def has_predictors(selector, num_tokens):
    """Whether predictors choose neurons of any layer in a step of so many tokens."""
    return _has_predictors(selector.team, num_tokens)


@njit(nogil=True, cache=True)
def _has_predictors(team, num_tokens):
    if team is None:
        return False
    return num_tokens <= team.work.scores.shape[0]


# Numba leaves out what follows `is None` only where an argument of its own is tested.


@njit(nogil=True, cache=True)
def _predicts(team, layer, num_tokens):
    if team is None:
        return False
    is_scored = num_scored(team.signs, layer) or num_scored(team.lowrank, layer)
    return is_scored > 0 and num_tokens <= team.work.scores.shape[0]


@njit(nogil=True, cache=True)
def announce(selector, layer, num_tokens, residual, attention, number):
    """Prepare for `select`, before service `attention` is sent request `number`; 0: it has none.

    residual: the array of the residual stream, as INPUT of `predict_team`
    """
    input_code = residual if selector.reads_residual else FFN_INPUT
    _announce(selector.team, layer, num_tokens, input_code, attention, number)


@njit(nogil=True, cache=True)
def _announce(team, layer, num_tokens, input_code, attention, number):
    if team is None:
        return
    if _predicts(team, layer, num_tokens):
        write_task(team, layer, num_tokens, input_code, number if attention == team.service else 0)


@njit(nogil=True, cache=True)
def select(selector, layer, num_tokens, buffers, asked, cpus):
    """Write the `Selection` of the services `asked`; with predictors once attention has replied.

    Their words NUM_IDS and WEIGHS_BLOCKS, and ids and token masks of the services `cpus` where a
    predictor chooses. Others have neurons that are always requested.
    """
    for service in asked:
        buffers.requests[service, NUM_IDS] = ALL_NEURONS
        buffers.requests[service, WEIGHS_BLOCKS] = selector.is_routed[layer]
    _select_scored(selector.team, selector.bounds[layer], layer, num_tokens, buffers, cpus)


@njit(nogil=True, cache=True)
def _select_scored(team, bounds, layer, num_tokens, buffers, cpus):
    if team is None:
        return
    if not _predicts(team, layer, num_tokens):
        return
    scores = score_task(team, buffers)
    for c, service in enumerate(cpus):
        ids, masks = buffers.active_ids[service], buffers.active_masks[service]
        count = select_kernel(scores, bounds[c], bounds[c + 1], ids, masks)
        buffers.requests[service, NUM_IDS] = count
