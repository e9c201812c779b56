"""hotcold beside llama.cpp: the same weights, the same cores, in turn, A B C A B C.

    python -m benchmarks.vs_llama_cpp MODEL --llama-bench PATH --dtype f16 --dtype q8 \\
        --mode exact --mode sign --batch 1 --batch 4 --prompt-tokens 128 --prompt-tokens 512 \\
        --out benchmarks/results/NAME

    python -m benchmarks.vs_llama_cpp MODEL.gguf --mode dense --mode threshold

A GGUF file is read by both programs as it is. Any other MODEL is in float16, such as `hotcold
make-model` writes, of any family (`benchmarks/llama_gguf.py` says what llama.cpp reads instead).
Its predictors and thresholds, for the modes that take them, lie beside it.
`llama-bench` is taken from PATH unless given, and `--llama-bench` may be given for several builds.
`gguf` comes with the `bench` extra.

Everything stays loaded, so that a round takes seconds, and the ratio of each round is taken by
itself: a machine whose speed drifts does not bend it. Where the programs do not fit side by side,
`--one-at-a-time` loads one, measures it and ends it, then the next.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from benchmarks.hotcold_side import (
    AS_STORED,
    DTYPES,
    Prepared,
    instructions,
    loaded,
    measure,
    measure_load,
)
from benchmarks.llama_cpp import Build, Sizes, find_builds
from benchmarks.llama_cpp import measure as measure_llama_cpp
from benchmarks.llama_cpp import measure_load as measure_llama_cpp_load
from benchmarks.runs import Json, hotcold, table_option, where_and_when, write_report
from benchmarks.vs_table import table_of
from hotcold.actors.protocol.messages import MODES, PREDICTED_MODES
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError
from hotcold.model.gguf.file_names import is_gguf

_RECALL_WINDOW = 128  # tokens: bos and what the model says after it


class Comparison:
    """One model in one format, on both sides."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        modes: list[str],
        builds: list[Build],
        sizes: Sizes,
        thresholds: Path | None,
    ) -> None:
        """Check that the model can run so. Errors: HotcoldError."""
        self._model, self.dtype, self._builds, self._sizes = model, dtype, builds, sizes
        self._prepared = [Prepared.of(model, dtype, mode, sizes, thresholds) for mode in modes]

    def report(self, gguf: Path, rounds: int, load_rounds: int, one_at_a_time: bool) -> Json:
        """Measure; `gguf` is written unless it is there."""
        likeness = self._likeness(gguf)
        # The first one finds files that are not in memory and kernels that are not compiled.
        loads = [self._load(gguf) for _ in range(load_rounds + 1)][1:] if load_rounds else []
        runs = []
        for run in self._apart(gguf, rounds) if one_at_a_time else self._in_turn(gguf, rounds):
            runs.append(run)
            click.echo(f"{self.dtype}, round {len(runs)}: {progress(run)}", err=True)
        return {
            "dtype": self.dtype,
            "likeness": likeness,
            "gguf_bytes": gguf.stat().st_size,
            "loads": loads,
            "runs": runs,
            "recall": self._recall(),
        }

    def _likeness(self, gguf: Path) -> str:
        """What llama.cpp reads; `gguf` is there then."""
        if self.dtype == AS_STORED:
            return "the same file"
        from benchmarks.llama_gguf import likeness, write_gguf

        if not gguf.exists():
            write_gguf(self._model, gguf, self.dtype)
        return likeness(read_config(self._model))

    def _in_turn(self, gguf: Path, rounds: int) -> Iterator[Json]:
        with loaded(self._prepared) as running:
            for _ in range(rounds):
                theirs = self._llama_cpp(gguf)
                ours = {
                    each.mode: measure(system, each, self._sizes, each is self._prepared[0])
                    for system, each in zip(running, self._prepared, strict=True)
                }
                yield {"llama_cpp": theirs, "hotcold": ours}

    def _apart(self, gguf: Path, rounds: int) -> Iterator[Json]:
        for _ in range(rounds):
            theirs, ours = self._llama_cpp(gguf), {}
            for each in self._prepared:
                with loaded([each]) as (system,):
                    with_prefill = each is self._prepared[0]
                    ours[each.mode] = measure(system, each, self._sizes, with_prefill)
            yield {"llama_cpp": theirs, "hotcold": ours}

    def _llama_cpp(self, gguf: Path) -> list[Json]:
        return [measure_llama_cpp(build, gguf, self._sizes) for build in self._builds]

    def _load(self, gguf: Path) -> Json:
        threads = self._sizes.threads
        return {
            "llama_cpp": [measure_llama_cpp_load(each, gguf, threads) for each in self._builds],
            "hotcold": measure_load(self._prepared[0], self._model, self.dtype),
        }

    def _recall(self) -> Json:
        """Of predicted modes, the share of firing neurons that they list, on the model's words."""
        predicted = [each.mode for each in self._prepared if each.mode in PREDICTED_MODES]
        if not predicted:
            return {}
        threads = ["--threads", str(self._sizes.threads)]
        common = [*threads, "--dtype", self.dtype] if self.dtype in ("q8", "q4") else threads
        first = read_config(self._model).bos_token_id or 0
        wanted = ["--prompt-ids", str(first), "--max-tokens", str(_RECALL_WINDOW - 1)]
        greedy = ["--ignore-eos", "--temperature", "0", "--mode", "exact"]
        ids = hotcold("generate", str(self._model), *wanted, *greedy, *common)["ids"]
        window = ["--max-windows", "1", "--context-window", str(_RECALL_WINDOW)]
        found = {}
        with tempfile.TemporaryDirectory() as scratch:
            text = Path(scratch) / "ids.jsonl"
            text.write_text(json.dumps({"ids": ids}) + "\n")
            for mode in predicted:
                source = [str(self._model), "--text", str(text), "--mode", mode]
                run = hotcold("perplexity", *source, *window, *common)
                found[mode] = {
                    "by_layer": run["recall"],
                    "tokens": run["context_window"],
                    "distinct_tokens": len(set(ids)),
                }
        return found


@contextmanager
def gguf_path(model: Path, dtype: str, folder: Path | None) -> Iterator[Path]:
    """The file itself, or where converted weights lie: in `folder`, or somewhere until the end."""
    name = f"{model.resolve().name}-{dtype}.gguf"
    if dtype == AS_STORED:
        yield model
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder / name
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch) / name


def progress(run: Json) -> str:
    """A round in a line."""
    theirs = ", ".join(f"{each['name']} {each['decode']:.2f}" for each in run["llama_cpp"])
    ours = ", ".join(
        f"{mode} {found['tokens_per_s']:.2f}" for mode, found in run["hotcold"].items()
    )
    return f"decode {ours} against {theirs} tokens/s"


def _formats(model: Path, dtypes: tuple[str, ...]) -> list[str]:
    """What is compared: a GGUF file as it is, else these formats."""
    if not is_gguf(model):
        return list(dict.fromkeys(dtypes)) or ["f16"]
    if dtypes:
        raise click.UsageError(f"{model} is a GGUF file, compared as it is: leave out --dtype")
    return [AS_STORED]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-bench", "paths", multiple=True, help="llama.cpp's llama-bench; from PATH "
              "without it. May be given several times.")  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Format of "
              "weights, not for a GGUF file; f16 without it. Repeatable.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=("exact",),
              show_default=True, help="Repeatable; the first one's prefill and load are "
              "measured.")  # fmt: skip
@click.option("--thresholds", type=click.Path(exists=True, path_type=Path), help="Of the mode "
              "`threshold`, where they do not lie beside MODEL.")  # fmt: skip
@click.option("--batch", "batches", type=click.IntRange(1, 32), multiple=True, default=(1,),
              show_default=True, help="Requests at once; repeatable.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(min=2), multiple=True, default=(128,),
              show_default=True, help="Tokens of a prefill run; repeatable.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=2), default=48, show_default=True,
              help="Tokens decoded a run.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--load-rounds", type=click.IntRange(min=0), default=3, show_default=True,
              help="How often loading is timed, before all else.")  # fmt: skip
@click.option("--one-at-a-time", is_flag=True, help="Have one program loaded at a time.")
@click.option("--gguf-folder", type=click.Path(path_type=Path), help="Keep the converted weights "
              "here; those that are there are used.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    model: Path,
    paths: tuple[str, ...],
    dtypes: tuple[str, ...],
    modes: tuple[str, ...],
    thresholds: Path | None,
    batches: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    tokens: int,
    threads: int,
    rounds: int,
    load_rounds: int,
    one_at_a_time: bool,
    gguf_folder: Path | None,
    out: Path | None,
) -> None:
    """Measure decode, batches, prefill, load and memory of both, in every format and mode."""
    several = tuple(batch for batch in dict.fromkeys(batches) if batch > 1)
    sizes = Sizes(threads, tokens, tuple(dict.fromkeys(prompt_tokens)), several)
    builds, unique_modes = find_builds(paths, bool(several)), list(dict.fromkeys(modes))
    formats_of_weights = _formats(model, dtypes)
    try:
        about = where_and_when(model, threads)
        compared = [
            Comparison(model, dtype, unique_modes, builds, sizes, thresholds)
            for dtype in formats_of_weights
        ]
        formats = []
        for each in compared:
            with gguf_path(model, each.dtype, gguf_folder) as gguf:
                formats.append(each.report(gguf, rounds, load_rounds, one_at_a_time))
    except HotcoldError as error:
        raise click.ClickException(str(error)) from None
    report = {
        **about,
        "instructions": instructions(),
        "modes": unique_modes,
        "tokens": tokens,
        "prompt_tokens": sizes.prompt_tokens,
        "batches": several,
        "rounds": rounds,
        "one_at_a_time": one_at_a_time,
        "formats": formats,
    }
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
