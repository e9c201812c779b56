"""What options of Ollama, llama.cpp and vLLM are called here."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import click

# The option, or the argument that stands without one -> its names there.
OTHER_NAMES = {
    "--context": ("-c", "--ctx-size", "--n-ctx", "--num-ctx", "--max-model-len"),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--num-predict"),
    "--prompt": ("-p",),
    "--temperature": ("--temp",),
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
    """The error of an option that `command` has under another or a like name.

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
    if nearest := _nearest(error.option_name, command, ctx):
        told = f"No such option {error.option_name!r}. Did you mean {nearest!r}?"
        return click.NoSuchOption(error.option_name, told, ctx=ctx)
    return error


def _nearest(name: str, command: click.Command, ctx: click.Context) -> str:
    """The option that begins like `name`, else the one most like it; "" for none."""
    params = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    known = [option for param in params for option in param.opts if option.startswith("--")]
    if longer := sorted((option for option in known if option.startswith(name)), key=len):
        return longer[0]
    plain = {option.replace("-", ""): option for option in known}
    nearest = get_close_matches(name.replace("-", ""), plain, 1, 0.7)
    return plain[nearest[0]] if nearest else ""
