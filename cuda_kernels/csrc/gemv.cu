// GEMV: out[t, n] = weights[n] . x[t] + bias[n] + residual[t, n].
#include "dot_products.cuh"

struct Matrix {
    const u8* weights;
    const float* bias;  // null: none
    i64 row_bytes, num_rows;
};

template <int FORMAT, bool VECTOR, int TOKENS>
DEVICE void gemv(
    const Matrix& from, const Input& in, int tiles, const float* residual, float* out) {
    constexpr int ROWS = rows_of(FORMAT, TOKENS);
    WarpTile<ROWS, TOKENS> tile(tiles, from.num_rows);
    Rows rows = tile.rows(from.weights, from.row_bytes);
    if (rows.active == 0) return;
    float value = dot_products<FORMAT, VECTOR, ROWS, TOKENS>(rows, in, tile.first_token, tile.lane);
    if (!tile.is_valid(in.num_tokens)) return;
    i64 row = tile.first_row + tile.row(), cell = tile.token() * from.num_rows + row;
    if (from.bias) value += load(from.bias + row);
    if (residual) value += load_own(residual + cell);
    store(out + cell, value);
}

#define GEMV(FORMAT, VECTOR, TOKENS)                                                               \
    ENTRY(THREADS)                                                                                 \
    gemv_##FORMAT##_##VECTOR##_##TOKENS(                                                           \
        Matrix from, Input in, int tiles, const float* residual, float* out) {                     \
        gemv<FORMAT, VECTOR, TOKENS>(from, in, tiles, residual, out);                              \
    }
