"""What predictors cost the embedded demo model, and what they gain: quality and speed by mode.

    python -m benchmarks.demo_modes --out benchmarks/results/demo-modes

The model is profiled on `examples/train_demo/text.py`'s text in a scratch folder. For each kind
and target recall predictors are trained there and measured beside dense and exact: on the held-out
text, on
questions that the model was trained to answer, and decoding, all modes in turn.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.runs import Json, hotcold, table_option, where_and_when, write_report
from examples.train_demo.text import write_demo_text
from hotcold.model.files.locate import DEMO_DIRECTORY

_KINDS = ("sign", "lowrank")
_MAX_ANSWER_TOKENS = 96  # as examples/train_demo/measure.py, whose questions these are


@dataclass(frozen=True)
class Variant:
    """One mode, with the predictors of a target recall where it takes them."""

    mode: str
    target_recall: float | None = None
    predictors: Path | None = None

    @property
    def options(self) -> list[str]:
        """What says so on hotcold's command line."""
        found = ["--mode", self.mode]
        if self.predictors is not None:
            found += ["--predictors", str(self.predictors)]
        return found

    @property
    def title(self) -> str:
        """For a table's row."""
        return self.mode if self.target_recall is None else f"{self.mode} {self.target_recall:g}"


_Trained = tuple[Variant, Json | None]  # with train-predictors' answer


def table_of(report: Json) -> str:
    """The report as Markdown, a row a variant."""
    dense = report["variants"][0]
    asked = dense["answers"]["asked"]
    scored = dense["perplexity"]
    lines = [
        f"The demo model: {report['shape']}; batch 1; {report['machine']}; {report['date']}; "
        f"profiled on {report['profile_tokens']} tokens; speeds are medians of "
        f"{len(dense['decode'])} rounds in turn",
        "",
        "| mode, target recall | perplexity beside dense | mean KLD | same top token | least "
        "recall of a layer | gates computed | predictors, MB | decode, tokens/s | of exact | "
        f"right answers of {asked} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(report, found) for found in report["variants"]),
        "",
        f"Perplexity of dense on held-out text: {scored['ppl']:.2f} ({scored['tokens']} tokens in "
        f"{scored['windows']} windows of {scored['context_window']}); KLD, top token, recall and "
        "gates are of the same text. A predictor lists the neurons whose gates are computed; speed "
        "is of a prompt of spread-out token ids. An answer is right word for word.",
    ]
    return "\n".join(lines) + "\n"


def _row(report: Json, found: Json) -> str:
    scored, training = found["perplexity"], found["training"]
    compared = [""] * 3
    if scored["ppl_dense"] is not None:
        compared = [
            f"{scored['ppl'] / scored['ppl_dense'] - 1:+z.2%}",
            f"{scored['mean_kld']:.2g}",
            f"{scored['same_top_p']:.1%}",
        ]
    predicted = ["", "100%", ""]
    if training is not None:
        predicted = [
            f"{min(share for share in scored['recall'] if share is not None):.1%}",
            f"{scored['neurons_computed']:.1%}",
            f"{sum(training['bytes']) / 1e6:.2f}",
        ]
    exact = next(each for each in report["variants"] if each["mode"] == "exact")
    speeds = _speeds(found)
    ratio = median(a / b for a, b in zip(speeds, _speeds(exact), strict=True))
    rest = [f"{median(speeds):.0f}", f"{ratio:.2f}", str(found["answers"]["right"])]
    return f"| {' | '.join([found['title'], *compared, *predicted, *rest])} |"


def _speeds(found: Json) -> list[float]:
    return [run["tokens_per_s"] for run in found["decode"]]


def _train(kind: str, recall: float, inputs: Path, scratch: Path) -> _Trained:
    out = scratch / f"predictors-{kind}-{recall:g}.safetensors"
    command = ["train-predictors", "--kind", kind, "--recall", str(recall)]
    trained = hotcold(*command, "--inputs", str(inputs), "--out", str(out))
    del trained["path"]
    return Variant(kind, recall, out), trained


def _perplexity(variant: Variant, windows: int | None, threads: list[str]) -> Json:
    command = ["perplexity", "--text", str(DEMO_DIRECTORY / "heldout.txt")]
    some = [] if windows is None else ["--max-windows", str(windows)]
    return hotcold(*command, *variant.options, *some, *threads)


def _answers(variant: Variant, num_questions: int, num_threads: int | None) -> Json:
    """Ask the sampled questions of the model's own report, greedily, in one running system."""
    from hotcold.actors.protocol.messages import GenerateRequest
    from hotcold.actors.setup.preflight import SystemOptions, prepare_system
    from hotcold.jobs.support.loading import running_system
    from hotcold.model.sampling import SamplingParams

    sampled = json.loads((DEMO_DIRECTORY / "report.json").read_text())["sampled_answers"]
    asked = sampled[:num_questions]
    options = SystemOptions(
        mode=variant.mode,
        num_threads=num_threads,
        predictors=variant.predictors,
        speculate="off",
    )
    system, _ = prepare_system(DEMO_DIRECTORY, options)
    sampling = SamplingParams(max_tokens=_MAX_ANSWER_TOKENS, temperature=0.0)
    wrong = []
    with running_system(system) as running:
        for each in asked:
            messages = [{"role": "user", "content": each["question"]}]
            given = running.complete(GenerateRequest(sampling, messages=messages)).text
            if given != each["expected"]:
                wrong.append(
                    {"question": each["question"], "expected": each["expected"], "given": given}
                )
    return {"asked": len(asked), "right": len(asked) - len(wrong), "wrong": wrong}


def _numbers(_: click.Context, __: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text} is no list of numbers; write it like 0.9,0.95") from None


def _kinds(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    found = text.split(",")
    if set(found) - set(_KINDS):
        raise click.BadParameter(f"{text} has other kinds than {', '.join(_KINDS)}")
    return found


@click.command()
@click.option("--recalls", default="0.90,0.95,0.98,0.99", show_default=True, callback=_numbers)
@click.option("--kinds", default=",".join(_KINDS), show_default=True, callback=_kinds)
@click.option("--questions", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--windows", type=click.IntRange(min=1), help="Of the held-out text; all without it.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", "num_threads", type=int, help="Cores to use; all without it.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    recalls: list[float],
    kinds: list[str],
    questions: int,
    windows: int | None,
    rounds: int,
    num_threads: int | None,
    out: Path | None,
) -> None:
    """Measure dense, exact and every predicted mode of the demo model."""
    threads = [] if num_threads is None else ["--threads", str(num_threads)]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        inputs, profile_tokens = _profile(scratch, threads)
        trained: list[_Trained] = [(Variant("dense"), None), (Variant("exact"), None)]
        trained += [_train(kind, recall, inputs, scratch) for kind in kinds for recall in recalls]
        decoded = _decode_in_turn([variant for variant, _ in trained], rounds, threads)
        found = []
        for (variant, training), decode in zip(trained, decoded, strict=True):
            scores = _perplexity(variant, windows, threads)
            answers = _answers(variant, questions, num_threads)
            found.append(_variant_json(variant, training, scores, decode, answers))
            click.echo(f"{variant.title}: {answers['right']} of {answers['asked']} right", err=True)
    about = where_and_when(DEMO_DIRECTORY, decoded[0][0]["num_threads"])
    report = {**about, "profile_tokens": profile_tokens, "variants": found}
    write_report(report, table_of(report), out)


def _profile(scratch: Path, threads: list[str]) -> tuple[Path, int]:
    """Profile the model; where the recorded inputs are, and how many tokens were read."""
    text, inputs = scratch / "text.jsonl", scratch / "inputs.safetensors"
    write_demo_text(text)
    files = ["--out", str(scratch / "profile.safetensors"), "--inputs-out", str(inputs)]
    profiled = hotcold("profile", "--text", str(text), *files, *threads)
    return inputs, profiled["tokens"]


def _decode_in_turn(variants: list[Variant], rounds: int, threads: list[str]) -> list[list[Json]]:
    """Each variant's measurements, one a round."""
    decoded: list[list[Json]] = [[] for _ in variants]
    for number in range(rounds):
        for variant, runs in zip(variants, decoded, strict=True):
            runs.append(hotcold("bench", "decode", *variant.options, *threads))
        click.echo(f"decode, round {number + 1} of {rounds} done", err=True)
    return decoded


def _variant_json(
    variant: Variant, training: Json | None, scores: Json, decode: list[Json], answers: Json
) -> Json:
    about = {name: value for name, value in asdict(variant).items() if name != "predictors"}
    return {
        **about,
        "title": variant.title,
        "training": training,
        "perplexity": scores,
        "decode": decode,
        "answers": answers,
    }


if __name__ == "__main__":
    main()
