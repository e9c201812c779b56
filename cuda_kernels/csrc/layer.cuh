// A layer's numbers: LAYER_NUMBERS of numba_kernels/layer_record.py, field for field.
#pragma once

struct LayerNumbers {
    int num_heads, num_kv_heads, head_dim;
    int rope;    // which of the model's, or -1
    int window;  // positions that a token sees, or 0 for all
    int norm_kind;
    float norm_eps;
    float scale, softcap;  // of scores; softcap 0: none
    float residual_scale;
    int num_experts, num_blocks, num_chosen, num_groups, num_chosen_groups;
    int router_score;  // as in the Python module
    float router_scale;
    bool norms_chosen, routes_layer_input;
    bool adds_late, norms_input, norms_sum, is_parallel, norms_ffn_input, norms_output;
};
