"""`hotcold completion`: the script by which bash, zsh or fish complete commands and options."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from hotcold.model.errors import UsageError, shown

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_HOTCOLD_COMPLETE"


@click.command()
@click.argument("shell", required=False, type=click.Choice(_SHELLS))
@click.option("--install", is_flag=True, help="Write it into your home folder instead.")
@click.pass_context
def completion(ctx: click.Context, shell: str | None, install: bool) -> None:
    """Print the script by which SHELL, the one you use without it, completes commands.

    What --install writes bash and fish load by themselves; zsh by a line that is added to .zshrc.
    """
    shell = shell or _own_shell()
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "hotcold", _VARIABLE).source()
    if not install:
        click.echo(script)
        return
    path = _script_path(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script + "\n")
    click.echo(f"{shell} completes hotcold's commands from {path}; open a new shell")
    if shell == "zsh":
        _add_line(Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc", f'source "{path}"')


def _own_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise UsageError(f"the shell is {shown(name)}; name one of {', '.join(_SHELLS)}")
    return name


def _script_path(shell: str) -> Path:
    """Where bash-completion and fish look; zsh has no such place of a user's own."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion/completions/hotcold",
        "fish": settings / "fish/completions/hotcold.fish",
        "zsh": data / "hotcold/completion.zsh",
    }[shell]


def _add_line(path: Path, line: str) -> None:
    """Add `line` to the end of the file unless it is there."""
    text = path.read_text() if path.exists() else ""
    if line not in text.splitlines():
        gap = "" if not text or text.endswith("\n") else "\n"
        path.write_text(f"{text}{gap}{line}\n")
        click.echo(f"added to {path}: {line}")
