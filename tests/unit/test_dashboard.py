"""docs/grafana/hotcold-dashboard.json asks for what /metrics gives, and Grafana can show it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotcold.actors.protocol.messages import DraftCounts, DriverLoad, Generation
from hotcold.ui.api.metrics import Metrics, metrics_text
from tests.documents import ROOT

BOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/hotcold-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {one["name"]: one for one in BOARD["templating"]["list"]}
FUNCTIONS = {"avg", "histogram_quantile", "increase", "label_values", "max", "rate", "sum"}
GRAFANAS = {"__rate_interval"}


def given() -> dict[str, set[str]]:
    """Names of all samples -> their labels."""
    metrics = Metrics("words")
    reads = {"bytes_read": 1.0, "wait_share": 0.1, "hit_rate": 0.9}
    metrics.add_prompt(3)
    metrics.add_first(0.1, 1)
    metrics.add_tokens(0.1, 2)
    drafts = DraftCounts(2, 5, [2, 1], {"mtp": [5, 3]})
    metrics.add_result(Generation("a", [1], "stop", 3, 0.1, 0.1, reads=reads, drafts=drafts), 0.5)
    metrics.add_refusal(400)
    metrics.add_start()
    metrics.show(DriverLoad(1, 0, 0.5))
    text = metrics_text([metrics]).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def metrics_in(expression: str) -> list[str]:
    return re.findall(r"\b(?:vllm|hotcold):\w+", expression)


def wrong_in(expression: str, known: dict[str, set[str]]) -> str:
    """What is wrong with an expression, or ""."""
    names = metrics_in(expression)
    if len(names) != 1 or names[0] not in known:
        return f"{names} is not one that there is"
    groups = re.findall(r"by \(([^)]*)\)", expression)
    labels = {label.strip() for group in groups for label in group.split(",")}
    labels |= set(re.findall(r"(\w+)=~?\"", expression))
    if not labels <= known[names[0]]:
        return f"{labels} are not all of {names[0]}"
    if any(expression.count(a) != expression.count(b) for a, b in ("()", "{}", "[]")):
        return "brackets"
    rest = re.sub(r"\"[^\"]*\"|by \([^)]*\)|\{[^}]*\}|[\w]+:\w+", "", expression)
    if unknown := set(re.findall(r"\b[a-z_]{2,}(?=\s*\()", rest)) - FUNCTIONS:
        return f"{unknown} are no functions"
    variables = set(re.findall(r"\$(\w+)", expression)) - GRAFANAS
    return "" if variables <= VARIABLES.keys() else f"{variables} are no variables"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_what_there_is(expression: str) -> None:
    assert wrong_in(expression, given()) == ""
    (name,) = metrics_in(expression)
    is_counted = name.endswith(("_total", "_bucket"))
    assert is_counted == ("rate(" in expression or "increase(" in expression)
    assert name.endswith("_bucket") == ("histogram_quantile(" in expression)


def test_every_metric_is_shown() -> None:
    shown = {name for expression in EXPRESSIONS for name in metrics_in(expression)}
    assert {name for name in given() if not name.endswith(("_sum", "_count"))} == shown
