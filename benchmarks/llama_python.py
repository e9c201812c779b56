"""llama-bench's options and output through llama-cpp-python, where no llama-bench is at hand.

    python -m benchmarks.llama_python -m MODEL.gguf -t 2 -p 128,512 -n 64 -r 1 -o json

A line of JSON for each prompt length and one for decoding, with those of llama-bench's keys that
`benchmarks/llama_cpp.py` reads. As in llama-bench, ids are arbitrary and nothing is sampled.
"""

import importlib
import json
import time
from typing import Any

import click

_WARM_UP = 8  # tokens, or as many as are asked for, where those are fewer


def rate_of(llama: Any, num_prompt: int, num_tokens: int) -> float:
    """Tokens a second of a prompt that is read at once, or of tokens one after another."""
    llama.reset()
    batches = [_ids(num_prompt)] if num_prompt else [[each] for each in _ids(num_tokens)]
    started = time.perf_counter()
    for ids in batches:
        llama.eval(ids)
    return (num_prompt or num_tokens) / (time.perf_counter() - started)


def _ids(count: int) -> list[int]:
    return [1 + i % 31 for i in range(count)]


@click.command()
@click.option("-m", "model", required=True)
@click.option("-t", "threads", default=2)
@click.option("-p", "prompts", default="512")
@click.option("-n", "num_tokens", default=128)
@click.option("-r", "repeat", default=5)
@click.option("-o", "output", type=click.Choice(["json", "jsonl"]), default="json",
              help="Either way a line each.")  # fmt: skip
@click.option("--no-warmup", is_flag=True)
def main(
    model: str,
    threads: int,
    prompts: str,
    num_tokens: int,
    repeat: int,
    output: str,
    no_warmup: bool,
) -> None:
    """Time prefill and decode of MODEL."""
    llama_cpp = importlib.import_module("llama_cpp")  # with the bench extra only

    lengths = [int(each) for each in prompts.split(",") if int(each)]
    context = max([*lengths, num_tokens, _WARM_UP])
    llama = llama_cpp.Llama(
        model, n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads,
        verbose=False,
    )  # fmt: skip
    if not no_warmup:
        rate_of(llama, 0, min(_WARM_UP, num_tokens or _WARM_UP))
    runs = [(length, 0) for length in lengths] + [(0, num_tokens)] * bool(num_tokens)
    for num_prompt, num_gen in runs:
        rates = [rate_of(llama, num_prompt, num_gen) for _ in range(repeat)]
        row = {"n_prompt": num_prompt, "n_gen": num_gen, "samples_ts": rates}
        row["system_info"] = llama_cpp.llama_print_system_info().decode()
        click.echo(json.dumps(row | {"build_commit": llama_cpp.__version__}))


if __name__ == "__main__":
    main()
