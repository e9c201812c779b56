"""A click group whose commands are imported when one is named, so that `--help` stays fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from hotcold.jobs.support.console import Invocation
from hotcold.jobs.support.settings import check_top, let_settings_decide, read_settings
from hotcold.jobs.support.signals import interrupts_after


class LazyGroup(click.Group):
    """A group over a table of commands; every command that it loads also takes `--debug`.

    The table has of each by its name where it lives, "module:attribute", and the line that the
    group's help shows. An attribute of the module's name need not be named.
    """

    def __init__(
        self,
        *args: Any,
        lazy_commands: dict[str, tuple[str, str]],
        package: str = "",
        **kwargs: Any,
    ) -> None:
        """`package`: of modules whose names begin with a dot."""
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands
        self._package = package
        add_debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `help [COMMAND]` and `version` for the options that people may not know."""
        match args:
            case ["help", *command]:
                args = [*command, "--help"]
            case ["version"]:
                args = ["--version"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None where there is no such name."""
        if cmd_name not in self.lazy_commands:
            return None
        module, _, attribute = self.lazy_commands[cmd_name][0].partition(":")
        attribute = attribute or module.rpartition(".")[2]
        with interrupts_after():
            command: click.Command = getattr(import_module(module, self._package), attribute)
        add_debug_option(command)
        if not ctx.resilient_parsing:  # shell completion runs no command
            _let_settings_decide(ctx, cmd_name, command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with; an error names the nearest ones."""
        if not args[0].startswith("-") and args[0] not in self.lazy_commands:
            raise click.exceptions.NoSuchCommand(
                args[0], possibilities=self.list_commands(ctx), ctx=ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.lazy_commands.items()])


def _let_settings_decide(ctx: click.Context, name: str, command: click.Command) -> None:
    """Take the options of `command` from the environment and the settings' file, too."""
    path = [name]
    group = ctx
    while group.parent is not None:
        path.insert(0, str(group.info_name))
        group = group.parent
    content = read_settings()
    check_top(content, group.command.list_commands(group))  # type: ignore[attr-defined]
    ctx.default_map = {name: let_settings_decide(command, tuple(path), content)}


def add_debug_option(command: click.Command) -> None:
    """Let `--debug` be given at `command` and at everything below it."""
    if not any("--debug" in param.opts for param in command.params):
        option = click.Option(
            ["--debug"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_remember_debug,
            help="Show the traceback of an error.",
        )
        command.params.append(option)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            add_debug_option(below)


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Invocation).debug = True
