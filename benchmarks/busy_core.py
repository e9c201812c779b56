"""Decoding beside a program that keeps one core busy, in turn with another checkout and llama.cpp.

    python -m benchmarks.busy_core MODEL [--other CHECKOUT] [--threads 2] [--rounds 5]
        [--mode MODE] [--llama-bench BINARY GGUF]

All systems are loaded before the first round. In each round every one of them decodes alone and
beside `while True: pass`, which runs on the first core at the same priority: of N cores, N - 1/2
are left, which is the most that tokens a second can keep, unless memory is what limits them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

import click

from benchmarks.runs import spread

HERE = Path(__file__).resolve().parents[1]


@contextmanager
def busy_program(core: int) -> Iterator[None]:
    """A process that spins on `core`, until this one ends at the latest."""
    code = (
        f"import os; os.sched_setaffinity(0, [{core}])\n"
        f"print(flush=True)\nwhile os.getppid() == {os.getpid()}:\n for i in range(10**6): pass"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()


class Decoder:
    """A system of some checkout, in a process of its own; each call decodes once."""

    def __init__(self, checkout: Path, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--serve", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self()  # loaded, compiled

    def __call__(self) -> float:
        """Tokens a second of one request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("a system has ended")
        return float(line)

    def close(self) -> None:
        """End the system."""
        self._process.communicate()


class LlamaBench:
    """llama-bench's decoding of a GGUF file."""

    def __init__(self, binary: str, file: str, threads: int, tokens: int) -> None:
        self._command = [binary, "-m", file, "-t", str(threads), "-p", "0", "-n", str(tokens)]

    def __call__(self) -> float:
        """Tokens a second."""
        command = [*self._command, "-r", "1", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)[0]["avg_ts"])


def serve(settings: dict[str, Any], asked: IO[str]) -> None:
    """Answer each line that is asked with the tokens a second of a request."""
    from hotcold import LLM, SamplingParams  # of the checkout that is measured

    params = SamplingParams(max_tokens=settings["tokens"], temperature=0, ignore_eos=True)
    with LLM(settings["model"], own=True, progress=False, **settings["options"]) as llm:
        for _ in asked:
            answer = llm.generate(list(range(5, 21)), params).first
            print(answer.decode_tokens_per_s, flush=True)


def measure(decoders: dict[str, Any], core: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each, alone and beside the busy program, one a round."""
    found: dict[str, dict[str, list[float]]] = {n: {"alone": [], "beside": []} for n in decoders}
    for number in range(rounds):
        order = list(decoders)[:: 1 if number % 2 else -1]
        for name in order:
            found[name]["alone"].append(decoders[name]())
        with busy_program(core):
            for name in order:
                found[name]["beside"].append(decoders[name]())
    return found


def report(found: dict[str, dict[str, list[float]]], first: str) -> Iterator[str]:
    """A line for each, and its ratios to the first where there are others."""
    for name, rates in found.items():
        kept = [b / a for a, b in zip(rates["alone"], rates["beside"], strict=True)]
        text = f"{name}: {median(rates['alone']):.1f} tokens/s alone, "
        text += f"{median(rates['beside']):.1f} beside a busy program, {spread(kept)} of it kept"
        if name != first:
            ratios = [
                spread([b / a for a, b in zip(rates[key], found[first][key], strict=True)])
                for key in ("alone", "beside")
            ]
            text += f"; {first} by {name}: {ratios[0]} alone, {ratios[1]} beside"
        yield text


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--other", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--mode", help="As of hotcold bench.")
@click.option("--pin", default="auto", show_default=True)
@click.option("--llama-bench", nargs=2, metavar="BINARY GGUF")
def main(
    model: Path,
    other: Sequence[Path],
    threads: int,
    tokens: int,
    rounds: int,
    mode: str | None,
    pin: str,
    llama_bench: tuple[str, str] | None,
) -> None:
    """Decode MODEL alone and beside a program that keeps the first core busy."""
    options = {"mode": mode, "threads": threads, "pin": pin}
    settings = {"model": str(model.resolve()), "tokens": tokens, "options": options}
    with ExitStack() as stack:
        decoders: dict[str, Any] = {}
        for checkout in (HERE, *other):
            decoders[str(checkout)] = Decoder(checkout.resolve(), settings)
            stack.callback(decoders[str(checkout)].close)
        if llama_bench:
            decoders["llama.cpp"] = LlamaBench(*llama_bench, threads, tokens)
        core = min(os.sched_getaffinity(0))
        for line in report(measure(decoders, core, rounds), str(HERE)):
            click.echo(line)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]), sys.stdin)
    else:
        main()
