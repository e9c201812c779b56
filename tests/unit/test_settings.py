"""Options from the environment and from config.toml, as a user gives them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from hotcold.jobs.cli import cli, main
from hotcold.jobs.support.lazy_group import LazyGroup
from hotcold.jobs.support.settings import (
    OTHER_VARIABLES,
    SHARED_OPTIONS,
    GroupedCommand,
    ModelsArgument,
    SharedOption,
    settings_of,
    shared_option,
)
from tests.documents import ROOT
from tests.e2e.commands import run_main


def _command() -> click.Command:
    @click.command(cls=GroupedCommand)
    @click.argument("model", required=False)
    @click.option("--port", type=int, default=8000)
    @click.option("--names", multiple=True)
    @click.option("--loud", is_flag=True)
    @shared_option("--mode", type=click.Choice(["dense", "sign"]))
    @shared_option("--threads", "num_threads", type=int)
    def shows(**values: object) -> None:
        click.echo(repr(values))

    return shows


@click.group()
def bench() -> None:
    pass


run = _command()
bench.add_command(_command(), "decode")
TABLE = {
    "run": (f"{__name__}:run", "Runs."),
    "serves": (f"{__name__}:serves", "Takes several."),
    "bench": (f"{__name__}:bench", "A group."),
}


@click.command()
@click.argument("model", cls=ModelsArgument)
def serves(model: tuple[str, ...]) -> None:
    click.echo(repr(model))


group = LazyGroup("hotcold", lazy_commands=TABLE)

Given = Callable[..., str]


@pytest.fixture
def given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Given:
    """Run a command line with this file and these variables; its output, or its error."""

    def of(line: str, file: str | bytes | None = None, /, **variables: str) -> str:
        path = tmp_path / "config.toml"
        if file is not None:
            path.write_bytes(file if isinstance(file, bytes) else file.encode())
        monkeypatch.setenv("HOTCOLD_CONFIG", str(path))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = main(line.split(), group)
        out, err = capsys.readouterr()
        assert (status == 0) == (err == "") and err.count("\n") <= 1
        return (out + err).replace(str(path), "FILE")

    return of


def _values(out: str) -> dict[str, object]:
    return dict(eval(out))  # what `run` printed


NOTHING = {
    "model": None, "port": 8000, "names": (), "loud": False, "mode": None, "num_threads": None,
}  # fmt: skip


def test_the_file_sets_options_of_all_commands_and_of_one(given: Given) -> None:
    file = """
    mode = "sign"
    threads = 3
    model = "here"
    [run]
    port = 1
    names = ["a b", "c"]
    loud = true
    threads = 4
    [bench.decode]
    mode = "dense"
    """
    expected = {"model": "here", "port": 1, "names": ("a b", "c"), "loud": True, "mode": "sign"}
    assert _values(given("run", file)) == expected | {"num_threads": 4}
    assert _values(given("run", '[run]\nnames = "a b"'))["names"] == ("a b",)
    other = NOTHING | {"model": "here", "mode": "dense", "num_threads": 3}
    assert _values(given("bench decode", file)) == other


def test_line_before_environment_before_file(given: Given) -> None:
    file = 'threads = 1\nmode = "sign"\n'
    variables = {"HOTCOLD_THREADS": "2", "HOTCOLD_BENCH_DECODE_THREADS": "5"}
    assert _values(given("run", file, **variables))["num_threads"] == 2
    assert _values(given("bench decode"))["num_threads"] == 5
    found = _values(given("run --threads 3 there"))
    assert (found["num_threads"], found["mode"], found["model"]) == (3, "sign", "there")
    assert "(from HOTCOLD_RUN_PORT)" in given("run", HOTCOLD_RUN_PORT="many")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("thread = 1", "FILE: no option is called 'thread'; did you mean threads?"),
        ("[ran]\nport = 1", "FILE: no command is called 'ran'; did you mean run?"),
        ("[run]\nprot = 1", "[run] of FILE: no option is called 'prot'; did you mean port?"),
        ('[run]\nport = "many"', "'many' is not a valid integer. (from FILE)"),
        ("threads = 2026-01-01", "FILE: threads is datetime.date"),
        ("[bench]\ndecode = 1", "FILE: bench.decode is a command; write [bench.decode]"),
        ("mode = ", "FILE is no TOML: Invalid value"),
        (b"mode = '\xff'", "FILE is not in UTF-8"),
    ],
)
def test_a_wrong_file_is_one_line(given: Given, file: str | bytes, text: str) -> None:
    line = "bench decode" if file == "[bench]\ndecode = 1" else "run"
    out = given(line, file)
    assert out.startswith("hotcold: error: ") and text in out


def _commands(of: click.Command, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands by their names."""
    if not isinstance(of, click.Group):
        yield names, of
        return
    ctx = click.Context(of, resilient_parsing=True)
    for name in of.list_commands(ctx):
        command = of.get_command(ctx, name)
        assert command is not None
        yield from _commands(command, *names, name)


def test_every_option_is_a_setting_and_shared_ones_are_shared() -> None:
    """An option named like a shared one, that HOTCOLD_NAME would not set, would mislead."""
    shared = set().union(*SHARED_OPTIONS.values())
    own_meaning = {
        ("make-model", "context"), ("make-model", "dtype"), ("make-model", "seed"),
        ("profile", "max-tokens"), ("train-predictors", "dtype"), ("kernels", "dtype"),
        ("quantize", "dtype"),
    }  # fmt: skip
    for names, command in _commands(cli):
        options = [p for p in command.params if isinstance(p, click.Option)]
        unset = {"--help", "--help-all", "--debug"} | {p.opts[0] for p in options if p.required}
        keys = {setting.key for setting in settings_of(command, names)} - {"model"}
        assert {max(p.opts, key=len) for p in options} - unset == {f"--{key}" for key in keys}
        for option in options:
            key = max(option.opts, key=len).lstrip("-")
            if key in shared and not option.required and (names[-1], key) not in own_meaning:
                assert isinstance(option, SharedOption), (names, key)


def test_help_tells_common_options_first() -> None:
    texts = {flag: run_main("run", flag).out for flag in ("--help", "--help-all")}
    told = {
        flag: set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M))
        for flag, text in texts.items()
    }
    assert told["--help"] < told["--help-all"]
    assert len(texts["--help"].splitlines()) < 70 < len(texts["--help-all"].splitlines())
    left_out = len(told["--help-all"]) - len(told["--help"])
    assert f"{left_out} more options: hotcold run --help-all" in texts["--help"]
    assert "more options" not in texts["--help-all"]
    assert run_main("ps", "--help-all").status == 2  # which has no more


def test_config_says_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text('mode = "dense"\n[serve]\nport = 8080\nqueue = 3\napi-key = "0123456789abcdef"')
    monkeypatch.setenv("HOTCOLD_CONFIG", str(path))
    monkeypatch.setenv("HOTCOLD_SERVE_PORT", "9")
    monkeypatch.setenv("HOTCOLD_SEED", "1")
    assert [line.split() for line in run_main("config").out.splitlines()] == [
        [str(path)],
        ["mode", "dense", f"({path})"],
        ["seed", "1", "(HOTCOLD_SEED)"],
        ["serve.api-key", "...", f"({path})"],
        ["serve.port", "9", "(HOTCOLD_SERVE_PORT)"],
        ["serve.queue", "3", f"({path})"],
    ]
    monkeypatch.setenv("HOTCOLD_ARTIFACTS", "/a/folder")
    monkeypatch.setenv("HOTCOLD_TEMPRATURE", "1")
    told = run_main("config")
    assert ["artifacts", "/a/folder", "(HOTCOLD_ARTIFACTS)"] in map(str.split, told.out.split("\n"))
    assert told.err == (
        "HOTCOLD_TEMPRATURE is set, but no setting is called that; did you mean "
        "HOTCOLD_TEMPERATURE?\n"
    )
    path.write_text("[serve]\nprot = 1")
    assert "did you mean port?" in run_main("config").refusal


def test_the_example_is_a_file_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run_main("config", "--example").out.splitlines()
    is_setting = [" = " in line or line.startswith("# [") for line in lines]
    text = "\n".join(
        line.removeprefix("# ") for line, wanted in zip(lines, is_setting, strict=True) if wanted
    )
    content = tomllib.loads(text)
    assert content["serve"]["port"] == 8000 and content["bench"]["decode"]["tokens"] == 64
    assert {"model", "mode", "cpu-memory", "top-p"} <= set(content)
    assert content["generate"]["stop"] == content["logit-bias"] == []
    assert content["ignore-eos"] is content["generate"]["chat"] is False
    unset = [line for line in lines if line.endswith("  # unset by default")]
    assert [line.split()[1] for line in unset][:3] == ["model", "max-tokens", "seed"]
    assert content["bench"]["kernels"]["density"] == [0.1, 0.05]
    path = tmp_path / "config.toml"
    path.write_text(text)
    monkeypatch.setenv("HOTCOLD_CONFIG", str(path))
    assert run_main("config").status == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [("generate --mo", "--mode"), ("generate --mode s", "sign"), ("bench de", "decode")],
)
def test_what_is_completed(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the script that bash runs asks for it; a broken file of settings is no reason to fail."""
    assert "_HOTCOLD_COMPLETE" in run_main("completion", "bash").out
    monkeypatch.setenv("HOTCOLD_CONFIG", __file__)
    monkeypatch.setenv("_HOTCOLD_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"hotcold {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    with pytest.raises((SystemExit, click.exceptions.Exit)):
        cli.main(args=[], prog_name="hotcold", standalone_mode=False)
    assert {line.partition(",")[2] for line in capsys.readouterr().out.split()} == {expected}


def test_several_models(given: Given) -> None:
    """A name may have blanks in it, so only a list is several."""
    assert given("serves") == "()\n"
    assert given("serves", 'model = "a b"') == "('a b',)\n"
    assert given("serves", '[serves]\nmodel = ["a b", "c"]') == "('a b', 'c')\n"
    assert given("serves d e") == "('d', 'e')\n"
    assert given("serves", HOTCOLD_MODEL="f g") == "('f g',)\n"


def test_every_variable_that_is_read_is_known() -> None:
    found = set()
    packages = (one for one in ROOT.iterdir() if (one / "__init__.py").exists())
    for package in packages:
        if package.name == "tests":
            continue
        for file in package.rglob("*.py"):
            found.update(re.findall(r'"(HOTCOLD_[A-Z_]+)"', file.read_text()))
    assert found == OTHER_VARIABLES
