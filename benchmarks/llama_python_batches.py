"""llama-batched-bench's options and output through llama-cpp-python; see `llama_python`.

    python -m benchmarks.llama_python_batches -m MODEL.gguf -t 2 -c 1024 -npp 2 -ntg 48 -npl 4,8

A line of JSON for each number of sequences: tokens a second of all of them together.
"""

import importlib
import json
import time
from typing import Any

import click

_MAX_TOKENS = 512  # decoded at once


class Sequences:
    """Several sequences in one context of llama.cpp, by its C interface."""

    def __init__(self, model: str, threads: int, context: int, num_sequences: int) -> None:
        """Load MODEL with room for `context` tokens of all sequences."""
        self._library: Any = importlib.import_module("llama_cpp")  # with the bench extra only
        library = self._library
        library.llama_backend_init()
        loading = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(model.encode(), loading)
        if not self._model:
            raise click.ClickException(f"{model}: llama.cpp does not load it")
        wanted = library.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max = context, num_sequences
        wanted.n_threads = wanted.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, wanted)
        self._batch = library.llama_batch_init(_MAX_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forget all tokens."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)

    def decode(self, tokens: list[tuple[int, int, int]]) -> None:
        """Compute logits after each (token, position, sequence)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = True
        if self._library.llama_decode(self._context, batch):
            raise click.ClickException("llama.cpp does not decode the batch; give more context")
        self._library.llama_synchronize(self._context)


def rate_of(sequences: Sequences, count: int, num_prompt: int, num_tokens: int) -> float:
    """Tokens a second of `count` sequences, after prompts of so many tokens each."""
    sequences.clear()
    for position in range(num_prompt):
        sequences.decode([(1 + each % 31, position, each) for each in range(count)])
    started = time.perf_counter()
    for step in range(num_tokens):
        position = num_prompt + step
        sequences.decode([(1 + (each + step) % 31, position, each) for each in range(count)])
    return count * num_tokens / (time.perf_counter() - started)


@click.command()
@click.option("-m", "model", required=True)
@click.option("-t", "threads", default=2)
@click.option("-c", "context", default=1024)
@click.option("-npp", "num_prompt", default=2)
@click.option("-ntg", "num_tokens", default=48)
@click.option("-npl", "counts", default="4")
@click.option("--output-format", type=click.Choice(["jsonl"]), default="jsonl")
def main(
    model: str,
    threads: int,
    context: int,
    num_prompt: int,
    num_tokens: int,
    counts: str,
    output_format: str,
) -> None:
    """Time decoding of several sequences of MODEL at once."""
    wanted = [int(count) for count in counts.split(",")]
    sequences = Sequences(model, threads, context, max(wanted))
    rate_of(sequences, max(wanted), num_prompt, 2)
    for count in wanted:
        rate = rate_of(sequences, count, num_prompt, num_tokens)
        click.echo(json.dumps({"pl": count, "speed_tg": rate}))


if __name__ == "__main__":
    main()
