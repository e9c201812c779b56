// The hot FFN's first kernel: which neurons fire, and their h. A warp takes a few neurons: their
// gate rows, and where a gate passes for any token, its up row.
//
//     h[n, t] = fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n])
//
// A neuron fires where |fn(gate . x)| passes the gate threshold and |h|, times its down row's norm
// where that is known, the product threshold; there is none below zero. With drelu both factors are
// relu.
#include "dot_products.cuh"

// As in hotcold.numba_kernels.checks.
enum Activation { RELU = 0, SILU, GELU, GELU_TANH, RELU2, FATRELU, DRELU };

// A NaN stays NaN. gelu by erfc: 1 + erf(v) has no digits left where v is far below zero.
DEVICE float activate(int code, float threshold, float value) {
    if (code == SILU) return value / (1.0f + expf(-value));
    if (code == GELU) return 0.5f * value * erfcf(value * -0.70710678f);
    if (code == GELU_TANH) {
        float inner = 0.79788456f * (value + 0.044715f * value * value * value);
        return 0.5f * value * (1.0f + tanhf(inner));
    }
    if (code == RELU2) return value <= 0.0f ? 0.0f : value * value;
    return value <= threshold ? 0.0f : value;
}

// A NaN passes, so that it reaches the output.
DEVICE bool passes(float value, float threshold) { return !(fabsf(value) <= threshold); }

struct GateRows {
    const u8* gate;
    const u8* up;  // null in a two-matrix FFN
    const float* gate_bias;
    const float* up_bias;
    const float* down_norms;  // null: all are one
    const u32* token_masks;   // bit t: whether the neuron is active for token t; null: all are
    i64 row_bytes;
    int num_neurons;
};

// Bits of the warp's rows: whether each fires in any of the warps that share it.
template <int ROWS, int TOKENS>
DEVICE u32 rows_that_fire(bool fires, const WarpTile<ROWS, TOKENS>& tile, int tiles) {
    __shared__ u32 of_warps[WARPS];
    if (tiles > 1) __syncthreads();  // the last call's may still be read
    u32 lanes = __ballot_sync(ALL_LANES, fires), rows = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        u32 of_row = lanes >> r * TOKENS & ((1u << TOKENS) - 1);
        rows |= of_row ? 1u << r : 0;
    }
    if (tiles == 1) return rows;
    if (tile.lane == 0) of_warps[threadIdx.x / WARP] = rows;
    __syncthreads();
    rows = 0;
    for (int i = 0; i < tiles; ++i) rows |= of_warps[tile.set * tiles + i];
    return rows;
}

// h (N, T): rows of neurons that fire for no token are left as they are. is_fired (N,): bit 0 where
// a neuron fires, bit 1 where its up row was read.
template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void gates(
    const GateRows& from, const Input& in, int code, float threshold, float gate_threshold,
    float product_threshold, int tiles, float* h, int* is_fired) {
    constexpr int ROWS = rows_of(FORMAT, TOKENS);
    WarpTile<ROWS, TOKENS> tile(tiles, from.num_neurons);
    Rows rows = tile.rows(from.gate, from.row_bytes);
    i64 row = tile.first_row + tile.row();
    bool is_valid = tile.is_valid(in.num_tokens);
    float value = dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
    bool is_active = is_valid;
    if (is_valid && from.token_masks) is_active = load(from.token_masks + row) >> tile.token() & 1;
    if (is_valid && from.gate_bias) value += load(from.gate_bias + row);
    value = is_active ? activate(code, threshold, value) : 0.0f;
    bool fires = is_active && passes(value, gate_threshold);
    if (!fires) value = 0.0f;
    u32 fired = rows_that_fire(fires, tile, tiles), passed = fired;
    bool drops = product_threshold >= 0.0f && from.up;
    if (from.up && (fired != 0 || drops)) {  // with `drops` the block syncs again: all warps go on
        rows = tile.rows(from.up, from.row_bytes);
        rows.active &= fired;
        float factor =
            dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
        if (is_valid && from.up_bias) factor += load(from.up_bias + row);
        if (code == DRELU && factor <= 0.0f) factor = 0.0f;
        if (fires) value *= factor;
    }
    if (drops) {
        float norm = is_valid && from.down_norms ? load(from.down_norms + row) : 1.0f;
        fires = fires && passes(value * norm, product_threshold);
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
        const u8* gate, const u8* up, const float* gate_bias, const float* up_bias,                \
        const float* down_norms, const u32* token_masks, i64 row_bytes, int num_neurons,           \
        int width, const float* x, const u8* values, const float* scales, const float* sums,       \
        int num_tokens, int code, float threshold, float gate_threshold, float product_threshold,  \
        int tiles, float* h, int* is_fired) {                                                      \
        GateRows from{                                                                             \
            gate, up, gate_bias, up_bias, down_norms, token_masks, row_bytes, num_neurons};        \
        Input in{x, values, scales, sums, num_tokens, width};                                      \
        gates<FORMAT, VECTOR, TOKENS>(                                                             \
            from, in, code, threshold, gate_threshold, product_threshold, tiles, h, is_fired);     \
    }
