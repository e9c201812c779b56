"""What options of Ollama, llama.cpp and vLLM are called here."""

from __future__ import annotations

from collections.abc import Sequence

import click

# The option, or the argument that stands without one -> its names there.
OTHER_NAMES = {
    "--context": ("-c", "--ctx-size", "--n-ctx", "--num-ctx", "--max-model-len"),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--num-predict"),
    "--prompt": ("-p",),
    "PROMPT": ("-p", "--prompt"),
    "MODEL": ("-m", "--model", "-hf", "--hf-repo"),
    "--system": ("-sys", "--system-prompt"),
    "--threads": ("-t", "--n-threads", "--num-thread"),
    "--parallel": ("-np", "--max-num-seqs"),
    "--gpu-memory": (
        "-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu", "--gpu-memory-utilization",
    ),
    "--dtype": ("-q", "--quantize", "--quantization"),
    "--kv-dtype": ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
    "--keep": ("--keepalive",),
    "--thinking-token-budget": ("--reasoning-budget", "--thinking-budget"),
}  # fmt: skip


def explained(
    error: click.NoSuchOption, command: click.Command, given: Sequence[str], ctx: click.Context
) -> click.NoSuchOption:
    """The error of an option that `command` has under another name; any other as it is.

    `given` are its arguments: of -ngl click tells -n alone.
    """
    written = [one.partition("=")[0] for one in given if one.startswith(error.option_name)]
    for name in (*written, error.option_name):
        for param in command.get_params(ctx):
            is_option = isinstance(param, click.Option)
            own = param.opts[0] if is_option else (param.name or "").rstrip("s").upper()
            if name in OTHER_NAMES.get(own, ()):
                told = f"Did you mean {own!r}?" if is_option else f"{own} stands without an option."
                return click.NoSuchOption(name, f"No such option {name!r}. {told}", ctx=ctx)
    return error
