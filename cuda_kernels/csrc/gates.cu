// The hot FFN's first kernel: which neurons fire, and with what. Warps take a few neurons each:
// gate rows, and where one of them fires for any token, its up row.
//
//     h[n, t] = fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n])
//
// With drelu both factors are relu, and a neuron fires where neither is zero.
#include "products.cuh"

// As in numba_kernels.checks.
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

struct GateRows {
    const u8* gate;
    const u8* up;  // null in a two-matrix FFN
    const float* gate_bias;
    const float* up_bias;
    const u32* token_masks;  // bit t: whether a neuron is wanted for token t; null: all are
    i64 row_bytes;
    int num_neurons;
};

// For each row of the warp's, whether it fires in any of the warps that share it: bits of rows.
template <int ROWS, int TOKENS>
DEVICE u32 rows_that_fire(bool fires, const WarpTile<ROWS, TOKENS>& tile, int tiles) {
    __shared__ u32 of_warps[WARPS];
    if (tiles > 1) __syncthreads();  // they may still be read, of an earlier question
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

// h (N, T): rows of neurons that fire for no token are left as they are; is_fired (N,) says which.
template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void gates(
    const GateRows& from, const Input& in, int code, float threshold, bool keep_all, int tiles,
    float* h, int* is_fired) {
    constexpr int ROWS = rows_of(FORMAT, TOKENS);
    WarpTile<ROWS, TOKENS> tile(tiles, from.num_neurons);
    Rows rows = tile.rows(from.gate, from.row_bytes);
    i64 row = tile.first_row + tile.row();
    bool is_valid = tile.is_valid(in.num_tokens);
    float value = products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
    bool is_wanted = is_valid;
    if (is_valid && from.token_masks) is_wanted = load(from.token_masks + row) >> tile.token() & 1;
    if (is_valid && from.gate_bias) value += load(from.gate_bias + row);
    value = is_wanted ? activate(code, threshold, value) : 0.0f;
    bool fires = is_wanted && (value != 0.0f || keep_all);
    u32 fired = rows_that_fire(fires, tile, tiles);
    bool asks_up = code == DRELU && from.up;
    if (from.up && (fired != 0 || asks_up)) {  // with drelu the block's warps stay together
        rows = tile.rows(from.up, from.row_bytes);
        rows.active &= fired;
        float factor =
            products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
        if (is_valid && from.up_bias) factor += load(from.up_bias + row);
        if (asks_up && factor <= 0.0f) factor = 0.0f;
        if (fires) value *= factor;
    }
    if (asks_up) fired = rows_that_fire(fires && (value != 0.0f || keep_all), tile, tiles);
    if (tile.tile == 0 && tile.lane < tile.num_rows) {
        store(is_fired + tile.first_row + tile.lane, static_cast<int>(fired >> tile.lane & 1));
    }
    if (is_valid && fired >> tile.row() & 1) {
        store(h + row * in.num_tokens + tile.token(), value);
    }
}

#define GATES(FORMAT, VECTOR, TOKENS)                                                              \
    ENTRY(THREADS)                                                                                 \
    gates_##FORMAT##_##VECTOR##_##TOKENS(                                                          \
        const u8* gate, const u8* up, const float* gate_bias, const float* up_bias,                \
        const u32* token_masks, i64 row_bytes, int num_neurons, int width, const float* x,              \
        const u8* values, const float* scales, const float* sums, int num_tokens, int code,        \
        float threshold, int keep_all, int tiles, float* h, int* is_fired) {                       \
        GateRows from{gate, up, gate_bias, up_bias, token_masks, row_bytes, num_neurons};               \
        Input in{x, values, scales, sums, num_tokens, width};                                      \
        gates<FORMAT, VECTOR, TOKENS>(from, in, code, threshold, keep_all, tiles, h, is_fired);    \
    }
