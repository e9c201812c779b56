"""README and docs are true: commands parse, links and paths exist, packages are as listed."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import suppress

import click
import pytest

from hotcold.jobs.cli import cli
from tests.documents import ROOT, Page, page, pages
from tests.nothing_starts import nothing_starts

LIBRARY = tuple(sorted(path.name for path in (ROOT / "hotcold").iterdir() if path.is_symlink()))
FOLDERS = (*LIBRARY, "examples", "benchmarks", "tests", "docs", "clusters", ".ci")
SHELL = {"source", "export", "echo", "chmod", "python3", "ruff", "mypy", "lint-imports"}
# Options of other programs that the docs speak of.
FOREIGN = {
    "--fmad",
    "--dashboard-host",
    "--cpu-manager-policy",
    "--topology-manager-policy",
    "--num-gpus",
    "--cpus",  # of docker and podman
    "--cpuset-cpus",
    "--cpuset-mems",
    "--memory",
    "--shm-size",
    "--user",
}


@pytest.fixture(autouse=True)
def parsed_not_run() -> Iterator[None]:
    with nothing_starts():
        yield


def _all(commands: bool) -> list[str]:
    """The distinct commands of all pages: in shell blocks, or between backticks in prose."""
    found: list[str] = []
    for one in pages():
        found += one.commands() if commands else one.code()
    return sorted(set(found))


def _parse(group: click.Command, words: list[str], name: str) -> click.Context:
    """Parse `words` as the command line does, without calling any command.

    Errors:  click.UsageError
    """
    context = click.Context(group, info_name=name)
    command = group
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return command.make_context(name, words or ["--"], parent=context)
        found = command.get_command(context, words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]!r}")
        command, words = found, words[1:]
    return command.make_context(command.name or "", words, parent=context)


def _parse_module(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `python -m module` parse `words`; `--help` behind them keeps it from doing anything."""
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended, monkeypatch.context() as patch:
        # Programs end their process at once, and this one is to go on.
        patch.setattr(os, "_exit", sys.exit)
        patch.setenv("PYTHONSAFEPATH", "1")  # as they do, for what they start
        patch.setattr(sys, "stdout", sys.stdout)  # which they replace by their own
        patch.setattr(sys, "stderr", sys.stderr)
        patch.setattr(atexit, "_run_exitfuncs", lambda: None)
        patch.setattr("_signal.signal", lambda *_: None)  # that of `signal` calls it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code, f"python -m {module} refuses {shlex.join(words)}"


def _check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a command of a shell block could not be given as it stands."""
    program, *words = shlex.split(command)
    program = program.removeprefix(".venv/bin/")
    if [program, *words[:2]] == ["python", "-m", "pip"]:
        program, words = "pip", words[2:]
    if program == "hotcold":
        _parse(cli, words, program)
    elif program in ("python", "python3") and words[:1] == ["-m"] and words[1] != "venv":
        _parse_module(words[1], words[2:], monkeypatch)
    elif program == "ray":
        with warnings.catch_warnings():  # Ray's own, of its libraries
            warnings.simplefilter("ignore")
            from ray.scripts.scripts import cli as ray_cli
        if "--" in words:
            ours = words[words.index("--") + 1 :]
            _check(shlex.join(ours), monkeypatch)
            words = [*words[: words.index("--")], "--", "true"]
        _parse(ray_cli, words, program)
    elif program in ("pip", "uv"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert words[:2] in (["install", "-e"], ["tool", "install"], ["wheel", "--no-deps"])
        named = re.fullmatch(r"(?:\.|/path/to/hotcold)(?:\[([\w,]+)\])?", words[-1])
        assert named and set(filter(None, (named[1] or "").split(","))) <= set(
            extras["optional-dependencies"]
        )
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words if "/" in word)
        options = [word for word in words if word.startswith("-")]
        assert set(options) <= {"-n0", "-n1", "-m", "-q", "-k", "-x"}
        if "-m" in words:
            settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
            markers = settings["ini_options"]["markers"]
            assert words[words.index("-m") + 1] in {text.split(":")[0] for text in markers}
    elif "/" in program:
        source = (ROOT / program).read_text()
        assert os.access(ROOT / program, os.X_OK)
        assert all(f"{word} " in source for word in words if word.startswith("--"))
    else:
        assert program in SHELL | {"curl"}, f"no test knows {program!r}"


@pytest.mark.parametrize("command", _all(commands=True))
def test_command_can_be_given(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(command, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [text for text in _all(commands=False) if re.match(r"hotcold \S|python -m \S|ray \S", text)],
)
def test_command_in_prose_can_be_given(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prose may leave out what a command cannot do without; but all that it names exists."""
    with suppress(click.MissingParameter):
        _check(command, monkeypatch)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from _options(found, context)


def test_options_in_prose_exist() -> None:
    known = set(_options(cli, click.Context(cli))) | FOREIGN | {"--debug"}
    for path in (ROOT / "jobs/generate.py", *(ROOT / "benchmarks").glob("*.py")):
        known |= set(re.findall(r'"(--[a-z][a-z-]*)[/"]', path.read_text()))
    for one in pages():
        for text in one.code():
            if named := re.match(r"--[a-z][a-z-]*", text):
                assert named[0] in known, f"{one.path}: {text}"


@pytest.mark.parametrize("one", pages(), ids=lambda one: str(one.path))
def test_links_lead_somewhere(one: Page) -> None:
    for path, anchor in one.links():
        assert path.exists(), f"{one.path}: {path}"
        if anchor:
            assert anchor in page(str(path.relative_to(ROOT))).anchors, f"{path.name}#{anchor}"


@pytest.mark.parametrize("one", pages(), ids=lambda one: str(one.path))
def test_paths_exist(one: Page) -> None:
    """Every path between backticks or in a drawing that begins with one of our folders."""
    named = rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*"
    for found in re.findall(named, one.text):
        assert list(ROOT.glob(found.rstrip("./"))), f"{one.path}: {found}"


def test_the_proxy_of_the_example_asks_where_the_server_listens() -> None:
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    options = {one.name: one.default for one in serve.params}
    (example,) = page("docs/api.md").blocks("caddyfile")
    assert f"reverse_proxy {options['host']}:{options['port']}\n" in example


def test_every_page_of_docs_can_be_found_from_readme() -> None:
    linked = {path for path, _ in page("README.md").links()}
    assert set((ROOT / "docs").glob("*.md")) <= linked


ARCHITECTURE = "docs/architecture.md"


def test_every_package_is_in_the_table() -> None:
    """And no file of it: a package's first line says what is in it."""
    named = set()
    for cell in re.findall(r"^\| (`\w+/.*?) \|", page(ARCHITECTURE).text, re.M):
        named |= {name.strip("`").rstrip("/") for name in cell.split(", ")}
    beside = re.findall(r"`(\w+)/` ", page(ARCHITECTURE).text)  # "`ollama/` Ollama's"
    folders = {path.parent for name in LIBRARY for path in (ROOT / name).rglob("__init__.py")}
    missing = {path.relative_to(ROOT).as_posix() for path in folders if path.name not in beside}
    assert missing - named == set()
    assert {name for name in named if not (ROOT / name).is_dir()} == set()


# What README's first command does not install, by the commands that need it.
NEEDED = {
    "cluster": r"ray (job|start|up|down|attach)\b",
    "ui": r"hotcold serve\b|hotcold .*--keep\b",
    "plan": r"hotcold plan\b",
    "plot": r"hotcold .*--plot\b",
    "bench": r"python -m benchmarks\.(?!beside|start)",
}


@pytest.mark.parametrize("one", pages(), ids=lambda one: str(one.path))
def test_what_a_command_needs_is_named_on_its_page(one: Page) -> None:
    """Whoever has done README's set-up can run each, or reads what to install."""
    named = set(re.findall(r"\w+", " ".join(re.findall(r"\[([a-z,]+)\]['`]", one.text))))
    for command in one.commands():
        for extra, pattern in NEEDED.items():
            assert extra in named or not re.match(pattern, command), (extra, command)
