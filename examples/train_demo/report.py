"""The demo model's report: report.json for programs, REPORT.md for people."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from examples.train_demo.measure import evaluate


def write_report(model_dir: Path, training: dict[str, object] | None) -> None:
    """Measure the model in `model_dir`; None keeps what its report says of the training."""
    json_path = model_dir / "report.json"
    if training is None:
        kept = json.loads(json_path.read_text("utf-8")) if json_path.exists() else {}
        training = kept.get("training", {})
    report = {"training": training, **evaluate(model_dir)}
    json_path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    (model_dir / "REPORT.md").write_text(as_markdown(report), "utf-8")


def as_markdown(report: dict) -> str:
    """The report for a person."""
    answers, held_out, sparse = report["answers"], report["held_out"], report["sparsity"]
    uneven, wrong = report["skew"], []
    for answer in report["sampled_answers"]:
        if answer["given"] != answer["expected"]:
            wrong.append([answer["question"], answer["expected"], answer["given"]])
    lines = [
        "# The demo model: what it can do",
        "",
        "Written by `python -m examples.train_demo`; recomputed by `--evaluate demo`. All figures"
        " are of the float16 weights in this folder.",
        "",
        f"- It answers **{answers['right']} of {answers['sampled']}** sampled training questions"
        " with the docstring's first sentence, word for word (greedy decoding, seed"
        f" {answers['sample_seed']}); of all {report['corpus']['questions']:,} questions"
        f" {answers['all_questions_right_share']:.1%}.",
        f"- On held-out text **{sparse['held_out_text']:.1%}** of its gate activations are exactly"
        f" zero; on its questions and answers {sparse['questions_and_answers']:.1%}.",
        f"- **{uneven['neurons_for_80_percent_share']:.1%}** of the neurons make 80% of the"
        " activations on held-out text.",
        f"- Held-out perplexity {held_out['perplexity']} a token over {held_out['tokens']:,} tokens"
        f" ({held_out['bits_per_byte']} bits a byte).",
        "",
        *section("Training", report["training"].items(), ["", ""]),
        *section("Model", report["model"].items(), ["", ""]),
        *section("Each layer on held-out text", _layers(report), _LAYER_HEADER),
        *section(
            "Firing rates on held-out text, all layers",
            [(b["rate"], b["neurons"]) for b in uneven["histogram"]],
            ["tokens it fires for", "neurons"],
        ),
        *section("Wrong answers among the sampled", wrong, ["question", "expected", "given"]),
        "All sampled questions with both answers are in report.json.",
    ]
    return "\n".join(lines) + "\n"


_LAYER_HEADER = ["layer", "zero activations", "neurons that make 80%"]


def _layers(report: dict) -> Iterator[list[str]]:
    shares = report["skew"]["neurons_for_80_percent_share_per_layer"]
    zeros = report["sparsity"]["held_out_text_per_layer"]
    for layer_id, (zero, share) in enumerate(zip(zeros, shares, strict=True)):
        yield [str(layer_id), f"{zero:.1%}", f"{share:.1%}"]


def section(title: str, rows: Iterable[Sequence], header: Sequence[str]) -> list[str]:
    """A heading and a table, or "None."."""
    table = [_row(header), _row(["---"] * len(header)), *map(_row, rows)]
    return [f"## {title}", "", *(table if len(table) > 2 else ["None."]), ""]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
