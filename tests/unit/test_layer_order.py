"""The order of a layer's parts, with texts in place of numbers."""

import pytest

from hotcold.model.config.layer_order import (
    PARALLEL,
    PARALLEL_SHARED_NORM,
    POST_NORM,
    PRE_NORM,
    LayerOrder,
    layer_input,
    mixed_and_ffn_input,
)


@pytest.mark.parametrize(
    ("order", "residual", "mixed", "ffn_input"),
    [
        (PRE_NORM, "h", "h+a(n(h))", "f3(h+a(n(h)))"),
        (POST_NORM, "f2(h)", "n(f2(h)+a(f2(h)))", "n(f2(h)+a(f2(h)))"),
        (PARALLEL, "h", "h+a(n(h))", "f3(h)"),
        (PARALLEL_SHARED_NORM, "h", "h+a(n(h))", "n(h)"),
    ],
)
def test_formulas(order: LayerOrder, residual: str, mixed: str, ffn_input: str) -> None:
    assert layer_input(order, 0, "h", lambda layer, x: f"f{layer}({x})") == "h"
    assert layer_input(order, 3, "h", lambda layer, x: f"f{layer}({x})") == residual
    found = mixed_and_ffn_input(
        order,
        residual,
        norm=lambda x: f"n({x})",
        ffn_norm=lambda x: f"f3({x})",
        add_attention=lambda x, rest: f"{rest}+a({x})",
    )
    assert found == (mixed, ffn_input)
