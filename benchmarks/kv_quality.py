"""What a KV cache in fewer bits costs a model: perplexity and KL divergence beside float32.

    python -m benchmarks.kv_quality MODEL.gguf... --windows 8 --out benchmarks/results/kv-quality

Weights are dequantized to float32, so that nothing but the cache is rounded. Windows go through the
kernels of steps, which read the cache at every token. The text is documentation that comes with
Python. The error of ln ppl is that of the paired difference, token by token.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from benchmarks.gguf_quality import text_windows
from benchmarks.quality_models import targets, window_logits, write_dequantized
from benchmarks.runs import Json, table_option, where_and_when, write_report
from hotcold.actors.protocol.options import KV_DTYPES
from hotcold.numba_kernels.decode.scoring import Comparison, compare_logits
from tests.actors.in_process import InProcessSystem

_REFERENCE = "float32"


def compare(
    path: Path, windows: list[list[int]], kv_dtypes: list[str], threads: int
) -> dict[str, Json]:
    """By KV format: ppl; ln ppl less float32's, with its error; mean KL divergence; same top.

    One window's logits are held at a time.
    """
    kinds, size = list(dict.fromkeys([_REFERENCE, *kv_dtypes])), max(map(len, windows))
    scored: dict[str, list[Comparison]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        engines = {}
        for kind in kinds:
            system = InProcessSystem(path, num_threads=threads, kv_dtype=kind, num_positions=size)
            engines[kind] = stack.enter_context(system).engine("dense")
        for ids in windows:
            wanted = targets([ids], 0)
            reference = [row.copy() for row in window_logits(engines[_REFERENCE], [ids], 0)]
            for kind in kinds:
                rows = reference if kind == _REFERENCE else window_logits(engines[kind], [ids], 0)
                pairs = zip(reference, rows, wanted, strict=True)
                scored[kind] += [compare_logits(*each) for each in pairs]
    found = {}
    for kv_dtype in kv_dtypes:
        scores = scored[kv_dtype]
        loss = np.array([score.nll for score in scores])
        difference = loss - np.array([score.nll_dense for score in scores])
        found[kv_dtype] = {
            "ppl": float(np.exp(loss.mean())),
            "ln_ppl_difference": float(difference.mean()),
            "ln_ppl_stderr": float(difference.std() / np.sqrt(difference.size)),
            "mean_kld": max(0.0, float(np.mean([score.kld for score in scores]))),
            "same_top": float(np.mean([score.same_top for score in scores])),
        }
        click.echo(f"{path.name}, {kv_dtype}: {found[kv_dtype]}", err=True)
    return found


def table_of(report: Json) -> str:
    """The report as a table."""
    lines = [
        f"{report['windows']} windows of {report['window']} tokens; weights as float32.",
        "",
        "| model | KV cache | ppl | change of ppl | mean KLD | same token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, formats in report["models"].items():
        for kv_dtype, each in formats.items():
            change = 100 * np.expm1(each["ln_ppl_difference"])
            error = 100 * each["ln_ppl_stderr"]
            lines.append(
                f"| {model} | {kv_dtype} | {each['ppl']:.3f} | {change:+.3f} ± {error:.3f}% | "
                f"{each['mean_kld']:.2e} | {100 * each['same_top']:.2f}% |"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("paths", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--windows", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--window", type=click.IntRange(min=2), default=1024, show_default=True)
@click.option("--kv-dtype", "kv_dtypes", type=click.Choice(KV_DTYPES), multiple=True,
              default=KV_DTYPES, show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    paths: tuple[Path, ...],
    windows: int,
    window: int,
    kv_dtypes: tuple[str, ...],
    threads: int,
    out: Path | None,
) -> None:
    """Score GGUF files with a KV cache in every format."""
    models: dict[str, dict[str, Json]] = {}
    for path in paths:
        texts = text_windows(path, windows, window)
        with tempfile.TemporaryDirectory() as scratch:
            wide = write_dequantized(path, Path(scratch) / "float32", "float32")
            models[path.name] = compare(wide, texts, list(kv_dtypes), threads)
    about = where_and_when(paths[0], threads)
    report = {**about, "windows": windows, "window": window, "models": models}
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
