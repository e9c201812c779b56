"""What kernels know of a layer beside its matrices: a record of numbers, and learned vectors.

Both are filled by name from a `LayerSpec` of the model package; `LayerNumbers` in
`cuda_kernels/csrc/layer.cuh` is the same record for a GPU.
"""

from typing import Any, NamedTuple

import numpy as np

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = range(3)  # `score` of a RouterSpec

# Fields of a LayerSpec, of its AttentionSpec and RouterSpec, and of its LayerOrder. In Numba an
# array of it gives records, in Python objects with these attributes.
LAYER_NUMBERS = np.dtype(
    (
        np.record,
        np.dtype(
            [
                ("num_heads", np.int32),
                ("num_kv_heads", np.int32),
                ("head_dim", np.int32),
                ("rope", np.int32),  # which of the model's, or -1: heads are not rotated
                ("query_rope", np.int32),  # the same for queries
                ("rotated_pairs", np.int32),  # numbers of a head that are rotated, by two
                ("q_norm_size", np.int32),  # numbers that are normed as one vector; 0: no norm
                ("k_norm_size", np.int32),
                ("v_norm_size", np.int32),
                ("page_group", np.int32),  # FULL, WINDOWED or RECURRENT of the loops' mailbox
                ("heads_size", np.int32),  # numbers of a token that attention's heads make
                # of multi-head latent attention, 0 without: `LatentSpec`
                ("latent_size", np.int32),  # of the vector that all heads' keys are made of
                ("query_rank", np.int32),
                ("plain_size", np.int32),
                ("value_size", np.int32),
                ("window", np.int32),  # positions that a token sees, its own too; 0: all
                ("norm_kind", np.int32),  # as in numba_kernels.decode.norm
                ("norm_eps", np.float32),
                ("scale", np.float32),  # of scores
                ("softcap", np.float32),  # of scores; 0: none
                ("residual_scale", np.float32),  # of what attention and FFN add
                # of the router (`numba_kernels.decode.router`)
                ("num_experts", np.int32),  # 0 in a dense layer
                ("num_blocks", np.int32),  # of neurons: the last may be a shared expert
                ("num_chosen", np.int32),
                ("num_groups", np.int32),
                ("num_chosen_groups", np.int32),
                ("router_score", np.int32),  # SOFTMAX, SIGMOID or SOFTMAX_OF_CHOSEN
                ("router_scale", np.float32),
                ("norms_chosen", np.bool_),
                ("routes_layer_input", np.bool_),  # the router reads it, not the FFN's input
                ("norms_rotated", np.bool_),  # q and k are normed after they are rotated
                ("adds_late", np.bool_),  # attention's output is normed or scaled, then added
                ("norms_input", np.bool_),
                ("norms_sum", np.bool_),
                ("is_parallel", np.bool_),
                ("norms_ffn_input", np.bool_),
                ("norms_output", np.bool_),
                ("scales_output", np.bool_),
                ("ends_pair", np.bool_),  # an FFN alone, beside that of the layer before
                ("has_keys", np.bool_),  # of its own; else it attends to those of another layer
                ("has_gate", np.bool_),  # of attention's heads
            ],
            align=True,
        ),
    )
)


class LayerVectors(NamedTuple):
    """A layer's norms and biases outside of the FFN: (L, size) float32, on a GPU (size,) each.

    size is 0 where there is none, else that of the layer with most: others have zeros behind. norm
    is before attention and ffn_norm before the FFN, or after their sums; attention_norm is of
    attention's output, q_norm and k_norm are of one head or of all together, v_norm is of one head;
    output_scale is a number; per_layer_norm is of what a layer's own embedding adds; sinks are a
    logit a head.
    """

    norm_weight: Any
    norm_bias: Any
    ffn_norm_weight: Any
    ffn_norm_bias: Any
    attention_norm_weight: Any
    q_norm_weight: Any
    k_norm_weight: Any
    v_norm_weight: Any
    output_scale: Any
    per_layer_norm_weight: Any
    qkv_bias: Any
    out_bias: Any
    sinks: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(vector.nbytes for vector in self)
