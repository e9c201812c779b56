"""What a system does, as a terminal shows it: its neurons by layers, its services, its speed."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotcold.model.byte_sizes import binary_text
from hotcold.model.sparsity import ACTIVATION_SHARE, hot_share

_HOT, _COLD = "dark_orange", "dodger_blue1"
_HOT_MARK = "◆"
# Of a cell's neurons, those that are computed: above so many its mark is this one.
_MARKS = ((0.5, "█"), (0.25, "▓"), (0.1, "▒"), (0.02, "░"), (0.0, "·"))
_LEGEND = "· few  ░ over 2%  ▒ 10%  ▓ 25%  █ 50%"
_BESIDE_MAP = 36  # columns of numbers
_STATES = {"alive": "green", "silent": "yellow", "restarting": "yellow", "dead": "red"}
_PARTS = {  # of a step's time -> where it is spent
    "attention": "gpu", "layers": "gpu", "head": "gpu", "ffn": "cpu", "predictor": "driver",
    "draft": "", "python": "driver",
    "exchange": "",
}  # fmt: skip
_FRAME_LINES = 16  # beside the map and the services


def picture(name: str, found: dict[str, Any], width: int, height: int = 0) -> RenderableType:
    """The whole picture of `found`, which `ui.telemetry` makes.

    `height`: so many lines at most, for which neighbouring layers share one; 0: as many as needed
    """
    max_rows = max(1, height - _FRAME_LINES - len(found["actors"])) if height else 0
    parts: list[RenderableType] = [_head(name, found), Text()]
    if found["map"]["steps"]:
        parts += [_neuron_map(found["map"], width, max_rows), Text(_legend(found), style="dim")]
        if found["map"]["experts"] is not None:
            parts.append(Text(_experts(found["map"]["experts"])))
    else:
        told = "no neuron has been counted yet: there was no request while somebody watched"
        parts.append(Text(told, style="dim"))
    parts += [Text(), _step(found), _services(found), Text(_machine(found), style="dim")]
    return Group(*parts)


def drawn(renderable: RenderableType, width: int, is_coloured: bool) -> str:
    """Its lines, with a terminal's codes for colours or without any."""
    console = Console(
        width=width, force_terminal=is_coloured, highlight=False, legacy_windows=False
    )
    if not is_coloured:
        console.no_color = True
    with console.capture() as captured:
        console.print(renderable, no_wrap=True, overflow="crop")
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _head(name: str, found: dict[str, Any]) -> Text:
    speed = f"{found['tokens_per_s']:.1f} tokens/s" if found["tokens_per_s"] else "idle"
    facts = [
        f"up {_time(found['uptime_s'])}",
        speed,
        f"{found['running']} running, {found['waiting']} waiting",
        f"{found['kv_pages_used']} of {found['kv_pages']} KV pages",
    ]
    return Text.assemble((name, "bold"), f"  {found['mode']}  ", "  ".join(facts))


def _neuron_map(found: dict[str, Any], width: int, max_rows: int) -> Table:
    """A row for each layer or few of them: what its neurons do, first to last, and shares.

    Of a mixture a cell is an expert, or few neighbours.
    """
    mean = found["mean"]
    computed, gates = np.array(mean["computed"]), np.array(mean["gates"])
    neurons = np.array(found["neurons"], float)
    hot = np.zeros(computed.shape) if found["hot"] is None else np.array(found["hot"], float)
    num_layers, num_buckets = computed.shape
    num_cells = next(n for n in (num_buckets, 32, 16, 8) if n <= max(8, width - _BESIDE_MAP))
    firsts = np.arange(num_cells) * num_buckets // num_cells
    many = -(-num_layers // max_rows) if max_rows else 1
    table = Table(box=None, pad_edge=False, show_edge=False)
    what = "its neurons, in the checkpoint's order" if found["experts"] is None else "its experts"
    for head in ("layer", what, "hot", "fire", "gates"):
        table.add_column(head, justify="left" if " " in head else "right", no_wrap=True)
    for first in range(0, num_layers, many):
        rows = slice(first, min(first + many, num_layers))
        cells = [
            np.add.reduceat(part[rows].sum(0), firsts) for part in (neurons, hot, computed, gates)
        ]
        label = str(first) if rows.stop - first == 1 else f"{first}-{rows.stop - 1}"
        total = cells[0].sum()
        shares = [f"{part.sum() / total:.1%}" for part in cells[1:]]
        table.add_row(label, _cells(*cells[:3]), *shares)
    return table


def _cells(neurons: np.ndarray, hot: np.ndarray, computed: np.ndarray) -> Text:
    line = Text()
    for num, num_hot, num_computed in zip(neurons, hot, computed, strict=True):
        if num_hot * 2 > num:
            line.append(_HOT_MARK, _HOT)
            continue
        share = num_computed / max(num, 1)
        line.append(next((mark for least, mark in _MARKS if share > least), " "), _COLD)
    return line


def _experts(experts: dict[str, Any]) -> str:
    """How unevenly tokens chose experts lately."""
    rows = zip(experts["chosen"], experts["count"], strict=True)
    rates = np.concatenate([row[:count] for row, count in rows])
    many = sorted({count for count in experts["count"] if count})
    text = f"experts: {experts['per_token']} of {' or '.join(map(str, many))} a token"
    if not rates.any():
        return text
    num_unchosen = int((rates == 0).sum())
    hits = experts["hit_rate"]
    in_memory = "" if hits is None else f"; {hits:.1%} of reads were in memory"
    return (
        f"{text}; {hot_share(rates):.0%} of them are {ACTIVATION_SHARE:.0%} of the choices, the "
        f"most wanted has {rates.max():.0%} of the tokens, {num_unchosen} of {rates.size} none"
        f"{in_memory}"
    )


def _legend(found: dict[str, Any]) -> str:
    hot = "" if found["map"]["hot"] is None else f"; {_HOT_MARK} hot, on the GPU"
    return f"computed of a cell: {_LEGEND}{hot}"


def _step(found: dict[str, Any]) -> Text:
    """Where a step's time goes."""
    times = found["per_step_ms"]
    total = times.get("total", 0.0)
    if not total:
        return Text("no step was taken in the last seconds", style="dim")
    shares = {part: times.get(part, 0.0) / total for part in _PARTS}
    exchange = shares.pop("exchange")
    parts = "  ".join(f"{part} {share:.0%}" for part, share in shares.items() if share)
    each = ""
    if not shares["layers"]:  # else nobody knows how many went together
        num_exchanges = 2 * len(found["map"]["last"]["computed"]) + 1
        each = f": {num_exchanges} a step, {1e3 * exchange * total / num_exchanges:.0f} µs each"
    drafts = found["drafts"]
    given = f" and gives {found['tokens_per_step']:.1f} tokens" if drafts else ""
    taken = "".join(
        f", {num_accepted / num_drafted:.0%} of drafts by {source} taken"
        for source, (num_drafted, num_accepted) in drafts.items()
    )
    return Text(
        f"a step takes {total:.2f} ms{given}{taken}: {parts}\n"
        f"exchange {exchange:.0%}{each} beside the services' work"
    )


def _services(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("service", "state", "device", "memory", "busy", "process"):
        table.add_column(head, justify="right" if head in ("memory", "busy") else "left")
    for actor in found["actors"]:
        is_known = actor["pid"] > 0
        table.add_row(
            _label(actor),
            Text(actor["state"], _STATES.get(actor["state"], "")),
            actor["device"] or "-",
            binary_text(actor["memory_bytes"]) if is_known else "-",
            _busy(found["per_step_ms"], actor["name"]) if is_known else "-",
            str(actor["pid"]) if is_known else "-",
        )
    return table


def _label(actor: dict[str, Any]) -> str:
    """Its name; the attention service's is gpu, also where it computes on the CPU."""
    is_on_cpu = actor["name"] == "gpu" and actor["device"] == "cpu"
    return "attention" if is_on_cpu else str(actor["name"])


def _busy(times: dict[str, float], name: str) -> str:
    """A service's share of a step's time; of several CPU services that of the slowest."""
    own = [times.get(part, 0.0) for part, who in _PARTS.items() if who and name.startswith(who)]
    return f"{sum(own) / times['total']:.0%}" if own and times.get("total") else "-"


def _machine(found: dict[str, Any]) -> str:
    used, whole = found["host_memory_used_bytes"], found["host_memory_bytes"]
    return f"this machine: {binary_text(used)} of {binary_text(whole)} in use"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
