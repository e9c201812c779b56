"""The neuron map of a mixture: experts by layer, and how often they are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.e2e.page_visit import QUESTION, ask, wait_for_answer
from tests.e2e.stand_in import mixture_map


def shades(page: Any, layer: int) -> list[int]:
    """Along the middle of a layer's row, how far each expert's cell is from the ground."""
    found: list[int] = page.evaluate(
        """([layer, layers, cells]) => {
            const canvas = document.querySelector('#live canvas');
            const context = canvas.getContext('2d');
            const y = Math.floor((layer + 0.5) * canvas.height / layers);
            const colour = (x) => [...context.getImageData(x, y, 1, 1).data];
            const ground = colour(Math.floor((39 + 0.5) * canvas.width / cells));  // never chosen
            return [...Array(cells).keys()].map((cell) => {
                const own = colour(Math.floor((cell + 0.5) * canvas.width / cells));
                return own.reduce((sum, part, i) => sum + Math.abs(part - ground[i]), 0);
            });
        }""",
        [layer, 12, 41],
    )
    return found


def where(page: Any) -> str:
    text: str = page.inner_text('#live [data-show="where"]')
    return text


def test_experts_are_shaded_by_how_often_they_are_chosen(open_page, book) -> None:
    book.has_experts = True
    page = open_page(color_scheme="dark")
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_selector("#live option[value=chosen]", state="attached")
    assert page.input_value("#live select") == "chosen"
    assert "each column an expert" in page.inner_text('#live [data-show="sentence"]')
    experts = mixture_map().experts
    assert experts is not None
    for layer in (1, 7):
        chosen, shown = experts.chosen[layer, :40], shades(page, layer)[:40]
        assert shown[39] == 0 and chosen[39] == 0
        order = np.argsort(chosen, kind="stable")
        darker = np.diff(np.array(shown)[order])
        assert (darker >= -3).all() and shown[int(chosen.argmax())] > 60  # within a step of colour
    page.focus("#live canvas")
    page.keyboard.press("ArrowDown")
    assert where(page).startswith("layer 1, expert 0, chosen by 25.0% of tokens: ")
    page.keyboard.press("ArrowLeft")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    assert where(page).startswith("layer 1, the shared expert, of all tokens: ")
    page.keyboard.press("ArrowUp")
    assert where(page).startswith("layer 0, neurons 2560–2623: ")
    page.select_option("#live select", "last")
    page.wait_for_function(
        "document.querySelector('#live canvas').ariaLabel.includes('last token')"
    )
    told = mixture_map()
    shown_gates = page.inner_text('#live [data-count="gate"]').replace(",", "")
    assert int(shown_gates) == int((told.last_gates - told.last_computed).sum())
