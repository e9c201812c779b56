"""Predictors for tests: what they score, some made by hand, and what a system chooses by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.decode.predict import (
    lowrank_hidden_kernel,
    lowrank_scores_kernel,
    sign_scores,
)
from hotcold.numba_kernels.loops.mailbox import ALL_NEURONS, NUM_IDS, SharedBuffers
from hotcold.numba_kernels.loops.predict_team import HIDDEN
from hotcold.numba_kernels.loops.selector import announce, select
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.predictor_file import Predictors, predictors_path, write_predictors
from hotcold.predictors.sign import SignLayer


def scores_of(layer: SignLayer | LowRankLayer, x: np.ndarray) -> np.ndarray:
    """Its scores of inputs (T, d), (T, N) float32, all at once by one thread."""
    if isinstance(layer, SignLayer):
        return sign_scores(layer.bits, x, layer.thresholds, layer.center, layer.scale)
    hidden = np.empty((x.shape[0], layer.hidden_size), np.float32)
    scores = np.empty((x.shape[0], layer.num_neurons), np.float32)
    lowrank_hidden_kernel(layer.down, layer.scales, x, hidden, 0, layer.hidden_size)
    for t in range(x.shape[0]):
        lowrank_scores_kernel(
            layer.up, hidden[t], layer.thresholds, scores[t], 0, layer.num_neurons
        )
    return scores


def linear_layer(rows: np.ndarray, thresholds: np.ndarray) -> LowRankLayer:
    """A predictor that scores rows (N, d) times x, as float16, minus thresholds (N,).

    Its hidden units are the positive and the negative part of each number of x.
    """
    width = rows.shape[1]
    identity = np.eye(width, dtype=np.float16)
    up = rows.T.astype(np.float16)
    return LowRankLayer(
        np.concatenate([identity, -identity]).view(np.uint16),
        np.ones(2 * width, np.float32),
        np.concatenate([up, -up]).view(np.uint16),
        thresholds.astype(np.float32),
    )


def column_layer(columns: np.ndarray, width: int) -> LowRankLayer:
    """A predictor that expects neuron n to fire where x[columns[n]] is above zero."""
    return linear_layer(np.eye(width)[columns], np.zeros(columns.size))


def constant_layer(chosen: np.ndarray, width: int) -> LowRankLayer:
    """A predictor that chooses the same neurons always. Shapes: chosen (N,) bool."""
    return linear_layer(np.zeros((chosen.size, width)), np.where(chosen, -1, 1))


def random_sign(random: np.random.Generator, config: ModelConfig) -> SignLayer:
    """A predictor that chooses about half of the neurons, others for every input."""
    size, width = config.ffn_size, config.hidden_size
    return SignLayer(
        random.integers(0, 1 << 48, (size, -(-width // 64))).astype(np.uint64),
        np.zeros(size, np.float32),
        np.zeros(width, np.float32),
        np.ones(width, np.float32),
    )


def write_sign_predictors(path: Path, seed: int) -> Path:
    """Write such predictors of a model, others with each seed, to where they are looked for."""
    random, config = np.random.default_rng(seed), read_config(path)
    layers = [random_sign(random, config) for _ in range(config.num_layers)]
    file = predictors_path(path, "sign")
    write_predictors(file, ModelIdentity.of(path), Predictors(layers, "ffn_input"))
    return file


def chosen_by(
    predictor: NeuronPredictor, buffers: SharedBuffers, layer: int, x: np.ndarray
) -> list[list[list[int]]] | None:
    """By service and token, the rows that are requested for x (T, d); None for all neurons."""
    thresholds = np.zeros((layer + 1, 2), np.int64)
    selector, num_tokens = predictor.selector(thresholds, np.zeros(layer + 1, np.bool_)), len(x)
    buffers.ffn_input[:num_tokens] = buffers.hidden[:num_tokens] = x
    services, num_shards = np.arange(buffers.requests.shape[0]), selector.bounds.shape[1] - 1
    cpus = services[services.size - num_shards :]
    announce(selector, layer, num_tokens, HIDDEN, 0, 0)
    select(selector, layer, num_tokens, buffers, services, cpus)
    found: list[list[list[int]]] = []
    for service in cpus:
        count = int(buffers.requests[service, NUM_IDS])
        if count == ALL_NEURONS:
            return None
        ids, masks = buffers.active_ids[service, :count], buffers.active_masks[service, :count]
        is_wanted = [
            (masks >> np.uint32(t)) & np.uint32(1) > 0 if num_tokens > 1 else np.ones(count, bool)
            for t in range(num_tokens)
        ]
        found.append([ids[wanted].tolist() for wanted in is_wanted])
    return found
