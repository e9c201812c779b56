// GEMV: out[t, n] = weights[n] . x[t] + bias[n] + residual[t, n].
#include "dot_products.cuh"

template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void gemv(
    const u8* weights, i64 row_bytes, i64 num_rows, const float* bias, const Input& in, int tiles,
    const float* residual, float* out) {
    constexpr int ROWS = rows_of(FORMAT, TOKENS);
    WarpTile<ROWS, TOKENS> tile(tiles, num_rows);
    Rows rows = tile.rows(weights, row_bytes);
    if (rows.active == 0) return;
    float value = dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
    if (!tile.is_valid(in.num_tokens)) return;
    i64 row = tile.first_row + tile.row(), cell = tile.token() * num_rows + row;
    if (bias) value += load(bias + row);
    if (residual) value += load_own(residual + cell);
    store(out + cell, value);
}

#define GEMV(FORMAT, VECTOR, TOKENS)                                                               \
    ENTRY(THREADS)                                                                                 \
    gemv_##FORMAT##_##VECTOR##_##TOKENS(                                                           \
        const u8* weights, i64 row_bytes, i64 num_rows, int width, const float* bias,              \
        const float* x, const u8* values, const float* scales, const float* sums, int num_tokens,  \
        int tiles, const float* residual, float* out) {                                            \
        Input in{x, values, scales, sums, num_tokens, width};                                      \
        gemv<FORMAT, VECTOR, TOKENS>(                                                              \
            weights, row_bytes, num_rows, bias, in, tiles, residual, out);                         \
    }
