"""`hotcold config`: what settings hold, and from where; an example of the file."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import click

from hotcold.jobs.support.settings import (
    OTHER_VARIABLES,
    PREFIX,
    Setting,
    SharedOption,
    let_settings_decide,
    read_settings,
    settings_of,
    settings_path,
)
from hotcold.model.files.artifact_places import ARTIFACTS

_SECRET = {"api-key"}
# Of options without a default, for the example.
_VALUES: dict[str, int | str] = {
    "max-tokens": 512, "max-tokens-limit": 4096, "threads": 4, "context": 8192, "parallel": 4,
    "kv-tokens": 32768, "prefix-cache": "20GiB", "cpu-memory": "8GiB", "gpu-memory": "8GiB",
}  # fmt: skip


@click.command()
@click.option("--example", is_flag=True, help="Print a file of all settings, each commented out.")
@click.pass_context
def config(ctx: click.Context, example: bool) -> None:
    """Say which settings hold, and from where: the environment, or a file of yours.

    Every option can be set by a variable, such as HOTCOLD_MODE for all commands and
    HOTCOLD_SERVE_PORT for one, or in the file, where those of one command stand in its table. The
    command line wins over the environment, and that over the file.
    """
    commands = dict(_commands(ctx))
    if example:
        click.echo(_example(commands))
        return
    content, path = read_settings(), settings_path()
    for names, command in commands.items():
        let_settings_decide(command, names, content)  # for its errors
    found = dict(_from_file(content)) | dict(_from_environment(commands))
    if artifacts := os.environ.get(ARTIFACTS):
        found["artifacts"] = artifacts, ARTIFACTS
    there = path is not None and path.exists()
    click.echo(f"{path or 'no file'}{'' if there or path is None else ' (not there)'}")
    width = max(map(len, found), default=0)
    for key, (value, origin) in sorted(found.items()):
        click.echo(f"  {key:{width}}  {value}  ({origin})")
    for line in _unknown_variables(commands):
        click.echo(line, err=True)


def _unknown_variables(commands: dict[tuple[str, ...], click.Command]) -> Iterator[str]:
    """A line for each variable HOTCOLD_... that nothing reads, with the nearest that is read."""
    settings = (one for names, command in commands.items() for one in settings_of(command, names))
    known = {name for one in settings for name in one.variables} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            nearest = get_close_matches(name, known, 1, cutoff=0.8)
            maybe = f"; did you mean {nearest[0]}?" if nearest else ""
            yield f"{name} is set, but no setting is called that{maybe}"


def _commands(
    ctx: click.Context, names: tuple[str, ...] = (), group: click.Group | None = None
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands by their path, in the order of the help."""
    group = group or ctx.find_root().command  # type: ignore[assignment]
    assert isinstance(group, click.Group)
    quiet = click.Context(group, resilient_parsing=True)
    for name in group.list_commands(quiet):
        command = group.get_command(quiet, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(ctx, (*names, name), command)
        else:
            yield (*names, name), command


_Found = tuple[str, tuple[str, str]]  # key; value and where it is from


def _from_file(content: dict[str, Any], names: tuple[str, ...] = ()) -> Iterator[_Found]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _from_file(value, (*names, key))
        else:
            yield ".".join((*names, key)), (_shown(key, value), str(settings_path()))


def _from_environment(commands: dict[tuple[str, ...], click.Command]) -> Iterator[_Found]:
    for names, command in commands.items():
        for setting in settings_of(command, names):
            for variable in setting.variables:
                if value := os.environ.get(variable):
                    at_top = setting.is_shared and variable == setting.variables[-1]
                    key = setting.key if at_top else ".".join((*names, setting.key))
                    yield key, (_shown(setting.key, value), variable)


def _shown(key: str, value: object) -> str:
    return "..." if key in _SECRET else str(value)


def _example(commands: dict[tuple[str, ...], click.Command]) -> str:
    """A file in which every setting is commented out; shared ones once, at its top."""
    parts = [
        "# Settings of hotcold: every option of the command line, with its default. A model's own\n"
        "# generation_config.json comes before the defaults of sampling.\n"
    ]
    shared: dict[str, Setting] = {}
    tables: list[str] = []
    names_of_tables = {names[0] for names in commands}
    for names, command in commands.items():
        own = []
        for setting in settings_of(command, names):
            if setting.is_shared and setting.key not in names_of_tables:
                shared.setdefault(setting.key, setting)
            else:
                own.append(_commented(setting))
        if own:
            tables.append("\n".join([f"# [{'.'.join(names)}]", *own]) + "\n")
    parts += ["\n".join(_commented(setting) for setting in shared.values()) + "\n"]
    return "\n".join(parts + tables)


def _commented(setting: Setting) -> str:
    param = setting.param
    about = (param.help or "") if isinstance(param, click.Option) else "The model to use."
    lines = textwrap.wrap(about, 94, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, f"# {setting.key} = {_example_value(param)}"])


def _example_value(param: click.Parameter) -> str:
    """The default as TOML; where there is none, a value of the right kind, and that it is none."""
    default = param.unset if isinstance(param, SharedOption) else None
    if default is None:
        default = param.default if not isinstance(param, click.Argument) else None
    if isinstance(param, click.Option) and param.is_flag:
        return json.dumps(default is True)
    if param.multiple:
        return json.dumps(list(default) if isinstance(default, tuple) else [])
    if isinstance(default, (int, float, str)) and default != "":
        return json.dumps(default)
    return f"{json.dumps(_some_value(param))}  # unset by default"


def _some_value(param: click.Parameter) -> int | str:
    key = max(param.opts, key=len).lstrip("-")
    if key in _VALUES:
        return _VALUES[key]
    if isinstance(param.type, click.Choice):
        return str(param.type.choices[0])
    is_number = isinstance(param.type, (click.types.IntParamType, click.types.FloatParamType))
    return 1 if is_number else ""
