// A layer's numbers: LAYER_NUMBERS of numba_kernels/layer_record.py, field for field.
#pragma once

struct LayerNumbers {
    int num_heads, num_kv_heads, head_dim;
    int rope;        // which of the model's, or -1
    int query_rope;  // the same for queries
    int rotated_pairs, q_norm_size, k_norm_size, v_norm_size;           // for the CPU
    int page_group, heads_size, latent_size, query_rank, plain_size, value_size;                   // too
    int window;  // positions that a token sees, or 0 for all
    int norm_kind;
    float norm_eps;
    float scale, softcap;  // of scores; softcap 0: none
    float residual_scale;
    int num_experts, num_blocks, num_chosen, num_groups, num_chosen_groups;
    int router_score;  // as in the Python module
    float router_scale;
    bool norms_chosen, routes_layer_input, norms_rotated;
    bool adds_late, norms_input, norms_sum, is_parallel, norms_ffn_input, norms_output;
    bool scales_output, ends_pair, has_keys, has_gate;  // for the CPU
};
