"""Settings: options given by environment variables or by one TOML file.

A command line wins over the environment, the environment over the file. In the file a shared option
stands at the top, any option in a table of its command:

    mode = "sign"
    cpu-memory = "8GiB"

    [serve]
    port = 8080

    [bench.decode]
    tokens = 128

HOTCOLD_MODE and HOTCOLD_SERVE_PORT do the same. The file is HOTCOLD_CONFIG, where that is set (and
none where it is empty), else hotcold/config.toml in the folder that the system has for settings.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from hotcold.actors.protocol.options import OPTIONS
from hotcold.jobs.support.other_names import explained
from hotcold.model.errors import UsageError, shown
from hotcold.model.files.artifact_places import ARTIFACTS
from hotcold.model.sampling import PARAMETERS
from hotcold.model.secret_variable import API_KEY

PREFIX = "HOTCOLD_"
_FILE_VARIABLE = "HOTCOLD_CONFIG"
# Variables that are not called after an option.
OTHER_VARIABLES = {API_KEY, ARTIFACTS, _FILE_VARIABLE, "HOTCOLD_FORK_SERVER", "HOTCOLD_NUMA_ROOT"}
_MAX_BYTES = 1 << 20


def flag_of(name: str) -> str:
    """The option of a parameter of that name."""
    return f"--{name.replace('_', '-')}"


# Section of `--help` -> the shared options in it, as they are written on a command line.
SHARED_OPTIONS = {
    "Sampling": tuple(flag_of(name)[2:] for name, one in PARAMETERS.items() if one.about),
    "System": tuple(one.flag[2:] for one in OPTIONS.values()),
    "Kept system": ("keep", "own"),
}
# Those of them that `--help` tells; `--help-all` tells the others, too.
_COMMON = {
    "max-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "stop",
    "mode", "dtype", "context", "threads", "cpu-memory", "gpu-memory", "speculate",
    "keep", "own",
}  # fmt: skip
_ALL = f"{__name__}.all"


class SharedOption(click.Option):
    """An option that HOTCOLD_NAME and the top of config.toml set for every command that has it."""

    def __init__(self, *args: Any, unset: Any = None, **kwargs: Any) -> None:
        """`unset`: what holds where it is not given, of an option that itself is None then."""
        super().__init__(*args, **kwargs)
        self.unset = unset
        key = max(self.opts, key=len).lstrip("-")
        (self.section,) = (name for name, keys in SHARED_OPTIONS.items() if key in keys)
        self.is_common = key in _COMMON

    def get_help_extra(self, ctx: click.Context) -> Any:
        """See click; with what holds where it is not given."""
        extra = super().get_help_extra(ctx)
        if self.unset is not None:
            is_list = isinstance(self.unset, tuple)
            extra["default"] = " ".join(map(json.dumps, self.unset)) if is_list else str(self.unset)
        return extra


class _OneName(click.types.StringParamType):
    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """One value, which may contain blanks."""
        return [rv]


class ModelsArgument(click.Argument):
    """MODELs, as many as there are; a setting names one, or in the file a list of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, nargs=-1, type=_OneName(), **kwargs)


def shared_option(*names: str, **kwargs: Any) -> Callable[..., Any]:
    """Like `click.option`, for one of SHARED_OPTIONS."""
    return click.option(*names, cls=SharedOption, **kwargs)


class GroupedCommand(click.Command):
    """A command whose help shows its own options first, and shared ones in a section a group.

    `--help` leaves out what few need; `--help-all` has all.
    An error of its command line says which command, and what another program's option is here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not all(_is_common(param) for param in self.params):
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                    callback=_show_all, help="Show all options and exit.",
                )
            )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise explained(error, self, given, ctx) from error
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group that has options."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        params = self.get_params(ctx)
        shown = params if ctx.meta.get(_ALL) else list(filter(_is_common, params))
        for param in shown:
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                name = f"{param.section} options" if isinstance(param, SharedOption) else "Options"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if left_out := len(params) - len(shown):
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more options: {ctx.command_path} --help-all")


def _is_common(param: click.Parameter) -> bool:
    return not isinstance(param, SharedOption) or param.is_common


def _show_all(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Setting(NamedTuple):
    """One option or argument that can be set, and how."""

    param: click.Parameter
    key: str  # in the file
    variables: tuple[str, ...]  # the first that is set holds
    is_shared: bool  # at the top of the file, too


def settings_path() -> Path | None:
    """The settings' file, whether it exists or not; None where HOTCOLD_CONFIG is empty."""
    chosen = os.environ.get(_FILE_VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    return Path(click.get_app_dir("hotcold")) / "config.toml"


def read_settings() -> dict[str, Any]:
    """The file's content; empty where there is none.

    Errors:  UsageError where it cannot be read or is no TOML
    """
    path = settings_path()
    try:
        if path is None or not path.exists():
            return {}
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(
                f"{path} has over {_MAX_BYTES >> 20} MiB; name another file in HOTCOLD_CONFIG"
            )
        return tomllib.loads(text.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not in UTF-8; convert it") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is no TOML: {error}; `hotcold config --example` prints a file"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; name another file in HOTCOLD_CONFIG"
        ) from None


def settings_of(command: click.Command, names: tuple[str, ...]) -> Iterator[Setting]:
    """What can be set of the command called by `names`, such as ("bench", "decode")."""
    for param in command.params:
        own = _setting_name(param)
        if own is None:
            continue
        is_shared = isinstance(param, (SharedOption, click.Argument))
        spellings = [own] if is_shared else []
        spellings.append("-".join((*names, own)))
        variables = [variable_of(text) for text in reversed(spellings)]
        yield Setting(param, own, tuple(variables), is_shared)


def variable_of(name: str) -> str:
    """The variable of an option or a command of that name."""
    return PREFIX + name.replace("-", "_").upper()


def _setting_name(param: click.Parameter) -> str | None:
    """The key of what may be set: options but for help and the like, and a MODEL that may miss."""
    if isinstance(param, click.Argument):
        return "model" if param.name == "model" and not param.required else None
    if not isinstance(param, click.Option) or param.is_eager or param.required:
        return None
    return max(param.opts, key=len).lstrip("-")


def let_settings_decide(
    command: click.Command, names: tuple[str, ...], content: dict[str, Any]
) -> dict[str, Any]:
    """Let the environment set the options of `command`; returns the file's, as a default_map.

    command: also a group whose commands are at hand
    content: the whole file, `read_settings`
    Errors:  UsageError for a key that no option has, or a value that no option takes
    """
    if isinstance(command, click.Group):
        return {
            name: let_settings_decide(below, (*names, name), content)
            for name, below in command.commands.items()
        }
    table = _table(content, names)
    found: dict[str, Any] = {}
    known: set[str] = set()
    for setting in settings_of(command, names):
        param = setting.param
        explicit = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
        param.envvar = [*explicit, *(name for name in setting.variables if name not in explicit)]
        known.add(setting.key)
        value = table.get(setting.key)
        if value is None and setting.is_shared and not isinstance(content.get(setting.key), dict):
            value = content.get(setting.key)  # a table at the top is the command of that name
        if value is not None:
            takes_list = param.multiple or param.nargs == -1
            is_one = takes_list and not isinstance(value, list)
            found[str(param.name)] = _plain([value] if is_one else value, setting.key)
    for key, value in table.items():
        if key not in known and not isinstance(value, dict):
            where = f"[{'.'.join(names)}] of {settings_path()}"
            raise UsageError(f"{where}: {_unknown(key, known)}")
    return found


def check_top(content: dict[str, Any], commands: list[str]) -> None:
    """Refuse what stands at the top of the file and is neither a shared option nor a command.

    Errors:  UsageError
    """
    shared = {"model"}.union(*SHARED_OPTIONS.values())
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in commands:
                nearest = _nearest(key, commands)
                raise UsageError(f"{settings_path()}: no command is called {shown(key)}{nearest}")
        elif key not in shared:
            raise UsageError(f"{settings_path()}: {_unknown(key, shared)}")


def origin_of(error: click.BadParameter) -> str | None:
    """Where a wrong value came from that was not on the line: a variable's name, or the file."""
    ctx, param = error.ctx, error.param
    if ctx is None or param is None or param.name is None:
        return None
    match ctx.get_parameter_source(param.name):
        case ParameterSource.ENVIRONMENT:
            names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
            return next((name for name in names if os.environ.get(name)), None)
        case ParameterSource.DEFAULT_MAP:
            return str(settings_path())
    return None


def _table(content: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The part of the file that is the command's own."""
    table: Any = content
    for depth, name in enumerate(names, 1):
        table = table.get(name, {})
        if not isinstance(table, dict):
            path = ".".join(names[:depth])
            raise UsageError(f"{settings_path()}: {path} is a command; write [{path}]")
    return dict(table)


def _plain(value: Any, key: str) -> Any:
    """The value as a command line would have it, so that one conversion serves both."""
    if isinstance(value, list):
        return [_plain(item, key) for item in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, int, float)):
        return str(value)
    raise UsageError(
        f"{settings_path()}: {key} is {shown(value)}; options take text, numbers, true or false, "
        "and lists of these"
    )


def _unknown(key: str, known: set[str]) -> str:
    return f"no option is called {shown(key)}{_nearest(key, sorted(known))}"


def _nearest(key: str, known: list[str]) -> str:
    nearest = get_close_matches(key, known, 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
