"""What a layer's description says of families whose layers differ, and kernels' record of it."""

import numpy as np
import pytest

from hotcold.actors.attention.arrays import layer_numbers
from hotcold.model.config.build import build_config
from hotcold.model.config.layer_order import PARALLEL_SHARED_NORM, PRE_AND_OUTPUT_NORM, PRE_NORM
from hotcold.numba_kernels.layer_record import LAYER_NUMBERS, LayerVectors
from tests.unit.family_configs import FALCON, GEMMA3, LLAMA, MINICPM, OPT, QWEN3, SMOLLM3


def test_layers_differ_in_rope_and_window() -> None:
    gemma = build_config(GEMMA3 | {"sliding_window": 9, "query_pre_attn_scalar": 4}).layers
    assert [layer.attention.window for layer in gemma] == [9, 9, 9, 9, 9, 0, 9]
    assert [layer.attention.rope for layer in gemma] == [1, 1, 1, 1, 1, 0, 1]
    assert {layer.attention.scale for layer in gemma} == {0.5}
    smol = build_config(SMOLLM3 | {"num_hidden_layers": 4}).layers
    assert [layer.attention.rope for layer in smol] == [0, 0, 0, -1]
    assert [layer.attention.rope for layer in build_config(OPT).layers] == [-1, -1]


def test_order_and_ffn() -> None:
    llama, falcon = build_config(LLAMA).layers[1], build_config(FALCON).layers[1]
    assert (llama.order, llama.adds_late) == (PRE_NORM, False)
    assert (falcon.order, falcon.adds_late) == (PARALLEL_SHARED_NORM, False)
    gemma = build_config(GEMMA3).layers[0]
    assert (gemma.order, gemma.adds_late) == (PRE_AND_OUTPUT_NORM, True)
    assert build_config(MINICPM | {"scale_depth": 1.4}).layers[0].adds_late
    assert (llama.ffn.has_gate, llama.ffn.has_biases, llama.ffn.block_sizes) == (True, False, (96,))
    assert (falcon.ffn.has_gate, falcon.ffn.activation_fn) == (False, "gelu")


@pytest.mark.parametrize(
    "config", [LLAMA, OPT, FALCON, GEMMA3, QWEN3], ids=lambda c: c["model_type"]
)
def test_every_vector_has_a_size(config: dict) -> None:
    for layer in build_config(config).layers:
        assert layer.vectors.keys() == set(LayerVectors._fields)
    sizes = build_config(QWEN3).layers[0].vectors
    assert (sizes["q_norm_weight"], sizes["k_norm_weight"]) == (128, 128)


def test_the_record_says_the_same() -> None:
    config = build_config(GEMMA3 | {"attn_logit_softcapping": 3.0})
    found = layer_numbers(config)
    assert found.dtype == LAYER_NUMBERS
    for record, layer in zip(found, config.layers, strict=True):
        attention = layer.attention
        assert (record.window, record.rope) == (attention.window, attention.rope)
        assert (record.softcap, record.norm_kind, record.adds_late) == (3.0, 0, True)
        assert record.scale == np.float32(attention.scale)
        assert record.norms_ffn_input and not record.norms_sum
