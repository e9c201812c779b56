"""How prompts are multiplied on this CPU, and work space for it.

Weights stay bits of their checkpoint's format.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.decode.vectors import takes_eights
from hotcold.numba_kernels.ffn.prompt_plan import (
    PromptFfnScratch,
    PromptPredictors,
    new_prompt_ffn_scratch,
    new_prompt_predictors,
)
from hotcold.numba_kernels.ffn_arrays import (
    ExpertPredictors,
    FfnArrays,
    TransposedArrays,
    most_rows,
)
from hotcold.numba_kernels.formats import ROW_FORMATS, is_quantized
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.prefill.shared_rows import (
    AMX,
    BFLOAT16,
    BOTH_ORDERS,
    FLOAT32,
    INT16,
    QUANTIZED,
    Tokens,
    new_tokens,
)

_FEATURES = ("amx-bf16", "avx512bf16", "avx512vnni")  # that decide, by LLVM's names


def matmul_features() -> frozenset[str]:
    """The features of the CPU that `matmul_kinds` looks at.

    Kernels are compiled for that CPU; see `has_feature`.
    """
    return frozenset(name for name in _FEATURES if has_feature(name))


def matmul_kinds(dtype: np.dtype, features: Collection[str]) -> tuple[type, type]:
    """How weights of `dtype` are multiplied on a CPU with `features`: x @ weights.T, h @ rows.

    It depends on nothing else, so that CPUs of one kind never differ in a bit:

    | weights             | amx-bf16  | avx512bf16 | avx512vnni | others    |
    | ------------------- | --------- | ---------- | ---------- | --------- |
    | float32             | FLOAT32   | FLOAT32    | FLOAT32    | FLOAT32   |
    | 16 bits, x @ w.T    | AMX       | BFLOAT16   | INT16      | FLOAT32   |
    | 16 bits, h @ rows   | AMX       | BFLOAT16   | FLOAT32    | FLOAT32   |
    | quantized, x @ w.T  | QUANTIZED | QUANTIZED  | QUANTIZED  | QUANTIZED |
    | quantized, h @ rows | AMX       | BFLOAT16   | FLOAT32    | FLOAT32   |

    A CPU is of the leftmost column whose feature it has. None of them lets a token's bits depend on
    its batch-mates. Figures: docs/decisions.md.
    """
    if dtype == np.float32:
        return FLOAT32, FLOAT32
    sums: type = BFLOAT16 if "avx512bf16" in features else FLOAT32
    if {"amx-bf16", "avx512bf16"} <= set(features):  # numbers are rounded by the latter
        sums = AMX
    if is_quantized(dtype):
        return QUANTIZED, sums
    if sums is FLOAT32 and "avx512vnni" in features:
        return INT16, sums
    return sums, sums


def tokens_kind(dtypes: Collection[np.dtype]) -> type:
    """What is multiplied with matrices of a role, x @ weights.T, whose rows are of these dtypes."""
    orders = {takes_eights(ROW_FORMATS[dtype]) for dtype in dtypes if is_quantized(dtype)}
    if len(orders) > 1:
        return BOTH_ORDERS
    return matmul_kinds(next(iter(dtypes)), matmul_features())[0]


def loop_tokens(
    num_threads: int, num_tokens: int, dtypes: Collection[np.dtype], width: int
) -> Tokens:
    """Work space of a compiled loop for tokens of up to `width` numbers: as `matmul_kinds` has it.

    They are multiplied with rows of `dtypes`, x @ weights.T.
    """
    return new_tokens(tokens_kind(dtypes), num_threads, num_tokens, width)


def ffn_scratch(
    arrays: FfnArrays | TransposedArrays, num_threads: int, num_tokens: int, width: int
) -> PromptFfnScratch:
    """Work space for a prompt's FFN.

    Few neurons go one by one up to the share of neurons up to which that is faster, and what makes
    its numbers, over all (docs/decisions.md). Of quantized ones as without AMX, which makes them
    twice as fast at most.
    """
    features, down = matmul_features(), arrays.down
    rows: tuple[Any, ...] = (arrays.gate, arrays.up)
    of_gates = {dtype for each in rows for dtype in getattr(each, "dtypes", ()) or (each.dtype,)}
    gates = tokens_kind(of_gates)
    if isinstance(down, BlockRows):
        downs, few = matmul_kinds(down.dtypes[0], features)[0], -1.0
    else:
        downs = matmul_kinds(down.dtype, features)[1]
        few = 0.05 if downs is AMX and not is_quantized(down.dtype) else 0.18
    return new_prompt_ffn_scratch(arrays, num_threads, num_tokens, width, (gates, downs), few)


def predictor_scratch(
    predictors: ExpertPredictors | None, starts: np.ndarray, num_threads: int, num_tokens: int,
    width: int,
) -> PromptPredictors | None:  # fmt: skip
    """Experts' predictors with work space, if there are any; starts: of the shard's `FfnArrays`."""
    if predictors is None:
        return None
    kind, _ = matmul_kinds(predictors.inner.dtype, matmul_features())
    rows = most_rows(starts)
    return new_prompt_predictors(predictors, num_threads, num_tokens, rows, width, kind)
