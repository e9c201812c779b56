"""Bytes of weights and KV cache, in memory and in files, computed before loading.

Matrices count in the config's dtypes; `stored_config` returns a config with those of loading.
"""

from __future__ import annotations

import math
from collections import Counter

from hotcold.model.config.families import tensor_names
from hotcold.model.config.layer_spec import LayerSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import mean_row_bytes, numpy_dtype, row_bytes
from hotcold.model.files.checkpoint import PREFIXES, Checkpoint
from hotcold.numba_kernels.formats import Q8, QUANT_GROUP, is_quantized, row_items, row_width
from hotcold.numba_kernels.recurrent_arrays import page_items

_HEAD, _PREDICTOR = "lm_head", ".predictor."


def num_parameters(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """Return the number of weights; a tied head counts once, layers for drafts do not."""
    names = tensor_names(config)
    drafts = [names.layers.format(config.num_layers + i) for i in range(config.num_extra_layers)]
    if names.draft.layer:
        drafts.append(names.draft.layer.split(".")[0])
    extra = tuple(prefix + draft for draft in drafts for prefix in PREFIXES)
    counted = [name for name in checkpoint.names() if _PREDICTOR not in name]
    counted = [name for name in counted if not name.startswith(extra)]
    if config.tied_embeddings:
        counted = [name for name in counted if _HEAD not in name]
    shapes = {name: checkpoint.shape(name) for name in counted}
    return sum(
        math.prod(shape[:-1]) * row_width(checkpoint.dtype(name), shape[-1])
        for name, shape in shapes.items()
    )


def num_unchosen_parameters(config: ModelConfig) -> int:
    """Return the number of weights of experts that a token does not choose, in all layers."""
    if config.experts is None:
        return 0
    router, experts = config.experts.router, config.experts
    matrices = 3 if config.has_gate else 2
    of_one = matrices * experts.size * config.hidden_size
    of_one += config.ffn_bias * ((matrices - 1) * experts.size + config.hidden_size)
    num_layers = config.num_experts // router.num_experts
    return num_layers * (router.num_experts - router.num_chosen) * of_one


def stored_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return bytes in the files by format, the largest first."""
    found: Counter[str] = Counter()
    for name in checkpoint.names():
        found[checkpoint.format_name(name)] += checkpoint.num_bytes(name)
    return dict(found.most_common())


def attention_bytes(config: ModelConfig) -> int:
    """Return the bytes of `AttentionWeights` of all layers: norms, biases, routers, too."""
    hidden = config.hidden_size
    rows = sum(layer.num_inputs for layer in config.layers)
    matrices = rows * mean_row_bytes(config, hidden, "qkv")
    matrices += hidden * sum(
        mean_row_bytes(config, layer.mixed_size, "out")
        for layer in config.layers
        if layer.mixed_size
    )
    matrices += config.num_layers * sum(
        num_rows * mean_row_bytes(config, width, kind)
        for kind, (num_rows, width) in config.latent_shapes.items()
        if num_rows
    )
    sizes = zip(*(layer.vectors.values() for layer in config.layers), strict=True)
    vectors = config.num_layers * sum(map(max, sizes))
    size = config.per_layer_size
    matrices += config.num_layers * 2 * size * row_bytes(config, hidden, "per_layer")
    matrices += config.num_layers * hidden * row_bytes(config, size, "per_layer") if size else 0
    return round(matrices + 4 * (vectors + _router_weights(config) + _recurrent_weights(config)))


def _recurrent_weights(config: ModelConfig) -> int:
    """The numbers of `RecurrentVectors`, in float32."""
    spec = config.recurrent
    if spec is None:
        return 0
    is_mamba = spec.kind == "mamba"
    own = spec.num_gates * config.hidden_size + spec.num_states * (2 + is_mamba)
    own += (spec.conv_size + spec.has_conv_bias) * spec.num_channels + spec.norm_size
    return len(config.recurrent_layers) * own


def _router_weights(config: ModelConfig) -> int:
    """The numbers of `RouterArrays`, in float32."""
    if config.experts is None:
        return 0
    router, hidden = config.experts.router, config.hidden_size
    row = hidden + router.has_bias + router.has_selection_bias + router.scales_experts
    return config.num_experts * row + config.num_layers * hidden * (
        router.gates_shared + router.scales_input
    )


def head_bytes(config: ModelConfig) -> int:
    """Return the bytes of `HeadWeights`."""
    projected = config.embed_size != config.hidden_size
    vectors = config.has_final_norm * config.hidden_size * (1 + config.norm_bias)
    vectors += projected * config.embed_size * config.hidden_size
    return config.vocab_size * row_bytes(config, config.embed_size, "head") + 4 * vectors


def ffn_bytes(config: ModelConfig, num_neurons_total: int, num_services: int = 1) -> int:
    """Return the bytes of `FfnWeights` with so many neurons, counted over all layers.

    num_services: among which each expert's neurons are divided
    """
    num_first = 2 if config.has_gate else 1
    rows = num_first * mean_row_bytes(config, config.hidden_size, "gate")
    rows += mean_row_bytes(config, config.hidden_size, "down")
    per_neuron = rows + 4 * num_first * config.ffn_bias + 4
    per_neuron += predictor_bytes_a_neuron(config, num_services)
    num_blocks = max(len(layer.ffn.block_sizes) for layer in config.layers)
    down_bias = config.num_layers * num_blocks * config.hidden_size * 4 * config.ffn_bias
    return round(num_neurons_total * per_neuron) + down_bias


def neuron_bytes(config: ModelConfig) -> int:
    """Return the bytes of one neuron of `FfnWeights`."""
    return ffn_bytes(config, 1) - ffn_bytes(config, 0)


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of all weights in memory."""
    return attention_bytes(config) + head_bytes(config) + ffn_bytes(config, config.num_neurons)


def predictor_bytes_a_neuron(config: ModelConfig, num_services: int = 1) -> float:
    """Bytes of predictors in experts, shared out among their neurons; in 8 bits if quantized.

    Each service has fc2's rows of its own neurons, and all of fc1.
    """
    if config.experts is None or not config.experts.has_predictors:
        return 0.0
    inner = num_services * config.hidden_size / config.experts.size
    weights = config.experts.mean_predictor_rank * (1 + inner)
    dtype = numpy_dtype(config.dtype_of("gate"))
    dtype = Q8 if is_quantized(dtype) else dtype
    return weights * row_items(dtype, QUANT_GROUP) * dtype.itemsize / QUANT_GROUP


def kv_row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Return the bytes of one head's key or value of a position, in a format of --kv-dtype.

    In q8 a float32 scale for each 32 numbers, or fewer, stands behind them.
    """
    if kv_dtype == "q8":
        return head_dim + 4 * -(-head_dim // 32)
    return head_dim * (4 if kv_dtype == "float32" else 2)


def kv_cache_bytes(
    config: ModelConfig, num_positions: int, kv_dtype: str, num_window_positions: int | None = None
) -> int:
    """Return the bytes of the keys and values of `num_positions` tokens in all layers.

    num_window_positions: those that layers with a window keep; None: all
    """
    if num_window_positions is None:
        num_window_positions = num_positions
    counts = num_positions, num_window_positions, 0
    return sum(
        counts[layer.page_group] * position_bytes(layer, kv_dtype) for layer in config.layers
    )


def rope_table_shape(config: ModelConfig, num_positions: int) -> tuple[int, int, int]:
    """Return the shape of the attention service's table on the CPU, of float32.

    For each rope and position cosines and sines of the pairs that turn in any rope, and one number.
    """
    sizes = map(config.rotated_head_dim, range(len(config.ropes)))
    pairs = [rope.turning_pairs(size) for rope, size in zip(config.ropes, sizes, strict=False)]
    return len(pairs), num_positions if pairs else 0, 2 * max(pairs, default=0) + 1


def recurrent_page_bytes(config: ModelConfig) -> int:
    """Return the bytes of a page of all recurrent layers: their state, and 16 positions."""
    spec = config.recurrent
    return 0 if spec is None else 4 * len(config.recurrent_layers) * page_items(spec)


def position_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Return the bytes of a layer's own keys and values of one position, which may be one row."""
    own = layer.attention
    rows = (2 if own.latent is None else 1) * own.has_keys * own.num_kv_heads
    return rows * kv_row_bytes(own.head_dim, kv_dtype)
