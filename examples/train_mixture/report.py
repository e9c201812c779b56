"""The mixture's report: report.json for programs, REPORT.md for people."""

import json
from pathlib import Path

from examples.train_demo.report import section
from examples.train_mixture.measure import evaluate


def write_report(folder: Path, training: dict[str, object] | None, routes: Path | None) -> None:
    """Measure the model in `folder`; None keeps what its report says of the training."""
    json_path = folder / "report.json"
    if training is None:
        kept = json.loads(json_path.read_text("utf-8")) if json_path.exists() else {}
        training = kept.get("training", {})
    report = {"training": training, **evaluate(folder, routes)}
    json_path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    (folder / "REPORT.md").write_text(as_markdown(report), "utf-8")


def as_markdown(report: dict) -> str:
    """The report for a person."""
    routes, sparse, held_out = report["routes"], report["sparsity"], report["held_out"]
    layers = zip(
        range(len(routes["kept_per_layer"])),
        routes["kept_per_layer"],
        routes["busier_half_per_layer"],
        sparse["zeros_per_layer"],
        ["", *(f"{share:.1%}" for share in report["ahead"])],
        strict=True,
    )
    lines = [
        "# A small mixture of experts: what its routes are like",
        "",
        "Written by `python -m examples.train_mixture`; recomputed by `--evaluate`. All figures are"
        f" of the float16 weights, on {held_out['tokens']:,} tokens of held-out text.",
        "",
        f"- **{routes['kept']:.1%}** of a token's experts were the token's before it, too;"
        f" {routes['kept_within_8']:.1%} one of the last eight tokens'.",
        f"- The busier half of the experts has **{routes['busier_half']:.1%}** of all choices.",
        f"- **{sparse['zeros']:.1%}** of the gates inside chosen experts are exactly zero; 80%"
        f" of the activations are of {sparse['neurons_for_80_percent_share']:.1%} of the neurons.",
        f"- Held-out perplexity {held_out['perplexity']} a token"
        f" ({held_out['bits_per_byte']} bits a byte).",
        "",
        *section(
            "Experts in memory",
            [
                (f"{h['resident']:.1%}", f"{h['lru']:.1%}", f"{h['fixed']:.1%}")
                for h in routes["hits"]
            ],
            ["resident", "hits, used last", "hits, used most in the other half of the text"],
        ),
        *section(
            "Layers",
            [(n, f"{k:.1%}", f"{s:.1%}", f"{z:.1%}", a) for n, k, s, z, a in layers],
            ["layer", "kept", "busier half", "zeros inside", "found a layer earlier"],
        ),
        *section("Training", report["training"].items(), ["", ""]),
        *section("Model", report["model"].items(), ["", ""]),
    ]
    return "\n".join(lines).rstrip() + "\n"
