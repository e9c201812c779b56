"""`hotcold completion`: the script by which bash, zsh or fish complete commands and options."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from hotcold.model.errors import UsageError, shown

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_HOTCOLD_COMPLETE"  # by which click knows that a shell asks


@click.command()
@click.argument("shell", required=False, type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the script by which SHELL, the one you use without it, completes commands.

    Load it where your shell begins: `source <(hotcold completion bash)` in ~/.bashrc, the same with
    zsh in ~/.zshrc, `hotcold completion fish | source` in ~/.config/fish/config.fish.
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _SHELLS else None
    if kind is None:
        raise UsageError(f"the shell is {shown(shell)}; name one of {', '.join(_SHELLS)}")
    click.echo(kind(ctx.find_root().command, {}, "hotcold", _VARIABLE).source())
