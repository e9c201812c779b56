"""The comparison's report as Markdown: a row a quantity, and notes below.

A ratio is of one round; over 1 is hotcold's favour in every row, also where less is better. Of
several builds of llama.cpp the one with the better median is quoted, separately for each quantity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.runs import Json, spread

_Get = Callable[[Json], float | None]


@dataclass(frozen=True)
class Quantity:
    """One row: its name, how to read it in a run of either side, and which end is better."""

    name: str
    theirs: _Get  # of one build in one round
    ours: _Get  # of all modes in one round
    less_is_better: bool = False
    unit: float = 1.0
    mode: str = ""  # where its density is of interest


def table_of(report: Json) -> str:
    """The report as Markdown."""
    how = "one program loaded at a time" if report["one_at_a_time"] else "in turn"
    lines = [
        f"{report['shape']}; {report['machine']}; {report['date']}; {report['rounds']} rounds, "
        f"{how}; medians",
        "",
        "| format | | llama.cpp | hotcold | ratio (least to most) | gates computed | up and down "
        "computed | GB a token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for found in report["formats"]:
        lines += [_row(found, quantity) for quantity in _quantities(report)]
        load = _load_row(found, report["modes"][0])
        lines += [load] if load else []
    lines += ["", _builds_note(report)]
    lines += [f"- hotcold: {report['instructions']}."] if "instructions" in report else []
    for found in report["formats"]:
        lines.append(f"- {found['dtype']}: llama.cpp reads {found['likeness']}.")
        lines += [_note(report, found, mode) for mode in report["modes"]]
    return "\n".join(lines) + "\n"


def _quantities(report: Json) -> list[Quantity]:
    modes, first = report["modes"], report["modes"][0]
    rows = [_decode(report["tokens"], mode) for mode in modes]
    rows += [_batch(str(batch), mode) for batch in report["batches"] for mode in modes]
    for length in map(str, report["prompt_tokens"]):
        rows += [
            _prompt(f"prefill of {length} tokens, tokens/s", length, "tokens_per_s", first),
            _prompt(f"first token after {length}, s", length, "first_token_s", first),
        ]
    return rows + [_memory(mode) for mode in modes]


def _decode(tokens: int, mode: str) -> Quantity:
    return Quantity(
        f"decode of {tokens} tokens, `{mode}`, tokens/s",
        lambda build: build["decode"],
        lambda ours: ours[mode]["tokens_per_s"],
        mode=mode,
    )


def _batch(batch: str, mode: str) -> Quantity:
    return Quantity(
        f"decode of {batch} requests at once, `{mode}`, tokens/s in all",
        lambda build: build["batch"].get(batch),
        lambda ours: ours[mode]["batch"][batch]["tokens_per_s"],
    )


def _prompt(name: str, length: str, key: str, mode: str) -> Quantity:
    return Quantity(
        name,
        lambda build: build["prefill"][length][key],
        lambda ours: ours[mode]["prefill"][length][key],
        less_is_better=key == "first_token_s",
    )


def _memory(mode: str) -> Quantity:
    return Quantity(
        f"peak memory, `{mode}`, GB",
        lambda build: build["peak_bytes"],
        lambda ours: ours[mode]["peak_bytes"],
        less_is_better=True,
        unit=1e9,
    )


def _row(found: Json, quantity: Quantity) -> str:
    _, theirs = best_build(found["runs"], quantity)
    ours = [quantity.ours(run["hotcold"]) or 0.0 for run in found["runs"]]
    cells = _cells(theirs, ours, quantity.less_is_better, quantity.unit)
    density = [""] * 3
    if quantity.mode:
        middle = _middle(found, quantity.mode)
        gigabytes = f"{middle['bytes_per_token'] / 1e9:.2f}"
        density = [f"{middle['gates_computed']:.1%}", f"{middle['density']:.1%}", gigabytes]
    return f"| {' | '.join([found['dtype'], quantity.name, *cells, *density])} |"


def best_build(runs: list[Json], quantity: Quantity) -> tuple[str, list[float]]:
    """The build whose median is better, and its value in every round; builds that lack it do not
    count.
    """
    known: list[tuple[str, list[float]]] = []
    for number, build in enumerate(runs[0]["llama_cpp"]):
        values = [quantity.theirs(run["llama_cpp"][number]) for run in runs]
        present = [value for value in values if value is not None]
        if len(present) == len(runs):
            known.append((build["name"], present))
    best = min if quantity.less_is_better else max
    return best(known, key=lambda each: median(each[1]))


def _cells(theirs: list[float], ours: list[float], less_is_better: bool, unit: float) -> list[str]:
    ratios = [b / a if less_is_better else a / b for a, b in zip(ours, theirs, strict=True)]
    return [_figure(median(theirs) / unit), _figure(median(ours) / unit), spread(ratios)]


def _figure(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _load_row(found: Json, mode: str) -> str:
    if not found["loads"]:
        return ""
    builds = zip(*(each["llama_cpp"] for each in found["loads"]), strict=True)
    theirs = min((list(each) for each in builds), key=median)
    cells = _cells(theirs, [each["hotcold"] for each in found["loads"]], True, 1.0)
    name = f"start of the program to its first token, `{mode}`, s"
    return f"| {' | '.join([found['dtype'], name, *cells, '', '', ''])} |"


def _middle(found: Json, mode: str) -> Json:
    """The round of middle speed."""
    runs: list[Json] = [run["hotcold"][mode] for run in found["runs"]]
    return sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]


def _builds_note(report: Json) -> str:
    builds = report["formats"][0]["runs"][0]["llama_cpp"]
    names = ", ".join(map(_build_text, builds))
    if len(builds) == 1:
        return f"- llama.cpp: {names}."
    better = []
    for found in report["formats"]:
        chosen = [best_build(found["runs"], quantity)[0] for quantity in _quantities(report)]
        counts = ", ".join(f"{name} {chosen.count(name)}" for name in dict.fromkeys(chosen))
        better.append(f"{found['dtype']} {counts}")
    return (
        f"- llama.cpp: builds {names}; the better one of each row is quoted, which is, by rows: "
        f"{'; '.join(better)}."
    )


def _build_text(build: Json) -> str:
    compiled = build.get("instructions")
    more = f", compiled for {compiled}" if compiled else ""
    return f"{build['name']} ({build['build']}{more})"


def _note(report: Json, found: Json, mode: str) -> str:
    middle = _middle(found, mode)
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in middle["per_token_ms"].items())
    text = (
        f"- {found['dtype']}, `{mode}`: {middle['gb_per_s']:.1f} GB/s of "
        f"{middle['read_gb_per_s']:.1f} that a plain read got "
        f"({middle['gb_per_s'] / middle['read_gb_per_s']:.0%}); milliseconds a token: {parts}; "
        f"{middle['resident_bytes'] / 1e9:.2f} GB resident when loaded."
    )
    return text + _fairness(report, found, mode) + _recall(found["recall"].get(mode))


def _fairness(report: Json, found: Json, mode: str) -> str:
    shares = {
        batch: median(
            run["hotcold"][mode]["batch"][batch]["slowest_share"] for run in found["runs"]
        )
        for batch in map(str, report["batches"])
    }
    if not shares:
        return ""
    listed = ", ".join(f"{share:.0%} of {batch}" for batch, share in shares.items())
    return f" The slowest request's share of the mean speed: {listed}."


def _recall(found: Json | None) -> str:
    if found is None:
        return ""
    known = [share for share in found["by_layer"] if share is not None]
    if not known:
        return f" No neuron fired on {found['tokens']} tokens, so recall is not known."
    return (
        f" Of the neurons that fire it computes {min(known):.2%} in the least layer, "
        f"{mean(known):.2%} in the mean of all ({found['tokens']} tokens that the model wrote "
        f"greedily, {found['distinct_tokens']} distinct)."
    )
