"""The order of a layer's parts: norms, attention, residual, FFN.

    residual = h                                or ffn_norm(h) of the layer before: `norms_output`
                                                or its output_scale * (h + its part of the token's
                                                embedding): `scales_output`
    x = norm(residual)                          or the residual itself, without `norms_input`
    ffn_residual = residual + attention(x)      or norm of that: `norms_sum`
                                                or residual + attention_norm(attention(x)):
                                                `norms_added`
    ffn_input = ffn_norm(ffn_residual)          or ffn_residual itself, without `norms_ffn_input`
                ffn_norm(residual), or x        of a parallel layer: `is_parallel`
    h = ffn_residual + ffn(ffn_input)           or ffn_residual + output_norm(ffn(ffn_input)):
                                                `norms_added`

A model's layer with two FFNs side by side (Gemma 4 26B-A4B) is two layers here, of which the second
has no attention and the first one's `ffn_residual`:
    h = output_norm(ffn(ffn_norm(ffn_residual)))                          `begins_pair`
    h = ffn_residual + pair_norm(h + output_norm(ffn(ffn_norm(ffn_residual))))    `ends_pair`
The router of the second reads ffn_residual, normed without weights.

The norm or scale at the end of a layer is computed at the start of the next layer, or of the head:
the attention service has their weights. Layers may have an embedding of each token of their own
(Gemma 4 E2B, E4B; Gemma 3n's per-layer embeddings). Its part, with h0 before the first layer:
    norm(projection(gelu(gate(h)) * (context_norm(context(h0)) + embedding(token)) / sqrt(2)))
FFN outputs with `norms_added` are normed where they are added up, by the driver or by a GPU that
has or shares the layer. Compiled loops read the same flags in a layer's record (LAYER_NUMBERS),
which may stand for a `LayerOrder` below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

_Rows = TypeVar("_Rows")  # (T, d), an array or a tensor


class LayerOrder(NamedTuple):
    """What distinguishes the families' layers; see the module's formulas. By default pre-norm."""

    norms_input: bool = True
    norms_sum: bool = False
    is_parallel: bool = False
    norms_ffn_input: bool = True
    norms_output: bool = False
    scales_output: bool = False
    begins_pair: bool = False
    ends_pair: bool = False
    norms_added: bool = False


def layer_input(
    order: LayerOrder,
    layer: int,
    h: _Rows,
    ffn_norm: Callable[[int, _Rows], _Rows],
    scaled_output: Callable[[int, _Rows], _Rows] | None = None,
) -> _Rows:
    """Return the residual at the start of a layer; for layer L, at the start of the head.

    `ffn_norm` and `scaled_output` take the number of a layer and rows; the latter is needed with
    `scales_output` alone.
    """
    if order.scales_output and layer > 0:
        assert scaled_output is not None, "the caller has no such models"
        return scaled_output(layer - 1, h)
    return ffn_norm(layer - 1, h) if order.norms_output and layer > 0 else h


def ffn_residual_and_input(
    order: LayerOrder,
    residual: _Rows,
    *,
    norm: Callable[[_Rows], _Rows],
    ffn_norm: Callable[[_Rows], _Rows],
    add_attention: Callable[[_Rows, _Rows], _Rows],
    on_input: Callable[[_Rows], None] = lambda ffn_input: None,
) -> tuple[_Rows, _Rows]:
    """Return `ffn_residual`, to which the FFN's output is added, and the FFN's input; maybe one.

    add_attention(x, residual) = residual + attention(x), or with `norms_added`
    residual + attention_norm(attention(x))
    on_input is called with the FFN's input once that is known: of parallel layers before attention
    """
    x = norm(residual) if order.norms_input else residual
    if order.is_parallel:
        ffn_input = ffn_norm(residual) if order.norms_ffn_input else x
        on_input(ffn_input)
    ffn_residual = add_attention(x, residual)
    if order.norms_sum:
        ffn_residual = norm(ffn_residual)
    if not order.is_parallel:
        ffn_input = ffn_norm(ffn_residual) if order.norms_ffn_input else ffn_residual
        on_input(ffn_input)
    return ffn_residual, ffn_input
