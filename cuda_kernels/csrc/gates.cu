// The hot FFN's first kernel: which neurons fire, and their h. A warp takes a few neurons: their
// gate rows, and where a gate passes for any token, its up row.
//
//     h[n, t] = fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * weight[t, block]
//
// A neuron fires where |fn(gate . x)| passes the gate threshold and |h|, times its down row's norm
// where that is known, the product threshold; there is none below zero. With drelu both factors are
// relu; with clamped_silu both have a limit.
#include "dot_products.cuh"

// As in hotcold.numba_kernels.checks.
enum Activation { RELU = 0, SILU, GELU, GELU_TANH, RELU2, FATRELU, DRELU, CLAMPED_SILU };

// A NaN stays NaN. gelu by erfc: 1 + erf(v) has no digits left where v is far below zero.
DEVICE float activate(int code, float threshold, float value) {
    if (code == SILU) return value / (1.0f + expf(-value));
    if (code == GELU) return 0.5f * value * erfcf(value * -0.70710678f);
    if (code == GELU_TANH) {
        float inner = 0.79788456f * (value + 0.044715f * value * value * value);
        return 0.5f * value * (1.0f + tanhf(inner));
    }
    if (code == CLAMPED_SILU) {
        if (value > threshold) value = threshold;
        return value / (1.0f + expf(-1.702f * value));
    }
    if (code == RELU2) return value <= 0.0f ? 0.0f : value * value;
    return value <= threshold ? 0.0f : value;
}

// up . x as it multiplies the gate; a NaN stays NaN.
DEVICE float activate_up(int code, float threshold, float value) {
    if (code == DRELU) return value <= 0.0f ? 0.0f : value;
    if (code != CLAMPED_SILU) return value;
    if (value > threshold) value = threshold;
    return (value < -threshold ? -threshold : value) + 1.0f;
}

// A NaN passes, so that it reaches the output.
DEVICE bool passes(float value, float threshold) { return !(fabsf(value) <= threshold); }

// A layer's neurons, in blocks: block b has the rows starts[b] to starts[b + 1] - 1.
struct GateRows {
    const u8* gate;
    const u8* up;  // null in a two-matrix FFN
    const float* gate_bias;
    const float* up_bias;
    const float* down_norms;  // null: all are one
    const int* starts;        // null: one block
    i64 row_bytes;
    int num_neurons, num_blocks;
};

struct FiringRule {
    float threshold;  // of the function
    float gate_threshold, product_threshold;
    int code;  // of the function
};

DEVICE float block_weight(const GateRows& from, const float* weights, i64 row, int token) {
    int block = 0;
    for (int end = from.num_blocks; end - block > 1;) {
        int middle = (block + end) / 2;
        if (load(from.starts + middle) <= row) block = middle;
        else end = middle;
    }
    return load(weights + token * from.num_blocks + block);
}

// Bits of the warp's rows that any of its own lanes has.
template <int ROWS, int TOKENS>
DEVICE u32 rows_of_lanes(bool has) {
    u32 lanes = __ballot_sync(ALL_LANES, has), rows = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        u32 of_row = lanes >> r * TOKENS & ((1u << TOKENS) - 1);
        rows |= of_row ? 1u << r : 0;
    }
    return rows;
}

// Bits of the warp's rows: whether each fires in any of the warps that share it.
template <int ROWS, int TOKENS>
DEVICE u32 rows_that_fire(bool fires, const WarpTile<ROWS, TOKENS>& tile, int tiles) {
    __shared__ u32 of_warps[WARPS];
    if (tiles > 1) __syncthreads();  // the last call's may still be read
    u32 rows = rows_of_lanes<ROWS, TOKENS>(fires);
    if (tiles == 1) return rows;
    if (tile.lane == 0) of_warps[threadIdx.x / WARP] = rows;
    __syncthreads();
    rows = 0;
    for (int i = 0; i < tiles; ++i) rows |= of_warps[tile.set * tiles + i];
    return rows;
}

// h (N, T): rows of neurons that fire for no token are left as they are. is_fired (N,): bit 0 where
// a neuron fires, bit 1 where its up row was read. block_weights (T, B): factors of h; 0: the block
// is not computed for the token, and rows that no token chose are not read. Null: all are computed.
// masks (N,): of predictors, bit t where token t wants a neuron, others as those of 0; or null.
template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void gates(
    const GateRows& from, const Input& in, const FiringRule& rule,
    const float* block_weights, const u32* masks, int tiles, float* h, int* is_fired) {
    constexpr int ROWS = rows_of(FORMAT, TOKENS);
    WarpTile<ROWS, TOKENS> tile(tiles, from.num_neurons);
    Rows rows = tile.rows(from.gate, from.row_bytes);
    i64 row = tile.first_row + tile.row();
    bool is_valid = tile.is_valid(in.num_tokens), is_active = is_valid;
    float value = 0.0f;
    if (block_weights || masks) {
        if (is_active && masks) is_active = load(masks + row) >> tile.token() & 1;
        if (is_active && block_weights) {
            is_active = block_weight(from, block_weights, row, tile.token()) != 0.0f;
        }
        rows.active &= rows_of_lanes<ROWS, TOKENS>(is_active);
    }
    if (rows.active) {
        value = dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
    }
    if (is_valid && from.gate_bias) value += load(from.gate_bias + row);
    value = is_active ? activate(rule.code, rule.threshold, value) : 0.0f;
    bool fires = is_active && passes(value, rule.gate_threshold);
    if (!fires) value = 0.0f;
    u32 fired = rows_that_fire(fires, tile, tiles), passed = fired;
    if (from.up && fired) {
        rows = tile.rows(from.up, from.row_bytes);
        rows.active &= fired;
        float factor =
            dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
        if (is_valid && from.up_bias) factor += load(from.up_bias + row);
        if (fires) value *= activate_up(rule.code, rule.threshold, factor);
    }
    if (fires && block_weights) value *= block_weight(from, block_weights, row, tile.token());
    if (from.up && rule.product_threshold >= 0.0f) {
        float norm = is_valid && from.down_norms ? load(from.down_norms + row) : 1.0f;
        fires = fires && passes(value * norm, rule.product_threshold);
        if (!fires) value = 0.0f;
        fired = rows_that_fire(fires, tile, tiles);
    }
    if (tile.tile == 0 && tile.lane < tile.num_rows) {
        u32 bits = (fired >> tile.lane & 1) | (passed >> tile.lane & 1) << 1;
        store(is_fired + tile.first_row + tile.lane, static_cast<int>(bits));
    }
    if (is_valid && fired >> tile.row() & 1) {
        store(h + row * in.num_tokens + tile.token(), value);
    }
}

#define GATES(FORMAT, VECTOR, TOKENS)                                                              \
    ENTRY(THREADS)                                                                                 \
    gates_##FORMAT##_##VECTOR##_##TOKENS(                                                          \
        GateRows from, Input in, FiringRule rule, const float* block_weights, const u32* masks,    \
        int tiles, float* h, int* is_fired) {                                                      \
        gates<FORMAT, VECTOR, TOKENS>(from, in, rule, block_weights, masks, tiles, h, is_fired);   \
    }
