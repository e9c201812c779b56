"""docs/grafana/hotcold-dashboard.json asks for what /metrics gives, and Grafana can show it."""

from __future__ import annotations

import itertools
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
    drafts = DraftCounts(2, 5, [2, 1])
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


@pytest.mark.parametrize(
    "expression",
    [
        "vllm:no_such_metric",
        "vllm:generation_tokens",
        'vllm:num_requests_running{modell="a"}',
        "sum by (status) (vllm:num_requests_running)",
        "sum(rate(vllm:generation_tokens_total[1m])",
        "median(vllm:num_requests_running)",
        'vllm:num_requests_running{model_name=~"$host"}',
    ],
)
def test_a_wrong_expression_is_found(expression: str) -> None:
    assert wrong_in(expression, given())


def test_drafts_are_counted_as_vllm_counts_them() -> None:
    metrics = Metrics("words")
    for drafts in (DraftCounts(2, 5, [2, 1]), DraftCounts(), DraftCounts(1, 3, [1, 1, 1])):
        metrics.add_result(Generation("a", [1], "stop", 3, 0.1, 0.1, drafts=drafts), 0.5)
    lines = metrics_text([metrics]).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:spec_decode"))
    name = 'vllm:spec_decode_num_{}_total{{model_name="words"{}}}'
    at = "accepted_tokens_per_pos"
    assert found == {
        name.format("drafts", ""): "3.0",
        name.format("draft_tokens", ""): "8.0",
        name.format("accepted_tokens", ""): "6.0",
        name.format(at, ',position="0"'): "3.0",
        name.format(at, ',position="1"'): "2.0",
        name.format(at, ',position="2"'): "1.0",
    }


def test_every_metric_is_shown() -> None:
    shown = {name for expression in EXPRESSIONS for name in metrics_in(expression)}
    assert {name for name in given() if not name.endswith(("_sum", "_count"))} == shown


def test_grafana_can_import_it() -> None:
    assert BOARD["uid"] == "hotcold" and BOARD["title"] and BOARD["schemaVersion"] >= 36
    assert "id" not in BOARD and "__inputs" not in BOARD  # of one Grafana alone
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert wrong_in(VARIABLES["model"]["query"]["query"], given()) == ""
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"] and panel["type"] in ("stat", "timeseries")
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_lies_on_another() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["h"] > 0 for at in places)
    for a, b in itertools.combinations(places, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
