"""Options that mean the same in several commands: one setting serves them all, help groups them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

# Section of `--help` -> the shared options in it, as they are written on a command line.
SHARED_OPTIONS = {
    "Sampling": (
        "max-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "stop", "ignore-eos",
    ),
    "System": (
        "mode", "predictors", "thresholds", "dtype", "plan", "threads", "cpu-actors", "context",
        "parallel", "kv-tokens", "kv-dtype", "device", "gpu-memory", "cpu-memory", "exchange",
        "pin", "hosts",
    ),
    "Kept system": ("keep", "own"),
}  # fmt: skip


class SharedOption(click.Option):
    """An option that HOTCOLD_NAME and the top of config.toml set for every command that has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        key = max(self.opts, key=len).lstrip("-")
        (self.section,) = (name for name, keys in SHARED_OPTIONS.items() if key in keys)


class _OneName(click.types.StringParamType):
    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """There may be blanks in it."""
        return [rv]


class ModelsArgument(click.Argument):
    """MODELs, as many as there are; a setting names one, or in the file a list of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, nargs=-1, type=_OneName(), **kwargs)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """All of them."""
        return super().type_cast_value(ctx, (value,) if isinstance(value, str) else value)


def shared_option(*names: str, **kwargs: Any) -> Callable[..., Any]:
    """Like `click.option`, for one of SHARED_OPTIONS."""
    return click.option(*names, cls=SharedOption, **kwargs)


class GroupedCommand(click.Command):
    """A command whose help shows its own options first, and shared ones in a section a group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group that has options."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                name = f"{param.section} options" if isinstance(param, SharedOption) else "Options"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
