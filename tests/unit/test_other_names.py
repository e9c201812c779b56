"""An option under Ollama's, llama.cpp's or vLLM's name is told under the name that it has here."""

from __future__ import annotations

import click
import pytest

from hotcold.jobs.cli import cli
from hotcold.jobs.support.other_names import OTHER_NAMES
from tests.e2e.commands import run_main


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("run demo -c 200 hi", "'-c'. Did you mean '--context'? (see 'hotcold run --help')"),
        ("run demo --num-ctx=9", "'--num-ctx'. Did you mean '--context'? (see 'hotcold run"),
        ("generate --temp 1", "'--temp'. Did you mean '--temperature'? (see 'hotcold generate"),
        ("generate --maxtokens 1", "'--maxtokens'. Did you mean '--max-tokens'? (see"),
        ("chat -n 9", "'-n'. Did you mean '--max-tokens'? (see 'hotcold chat"),
        ("chat -ngl 99", "'-ngl'. Did you mean '--gpu-memory'? (see 'hotcold chat"),
        ("generate -p hi", "'-p'. Did you mean '--prompt'? (see 'hotcold generate"),
        ("run demo -p hi", "'-p'. PROMPT stands without an option. (see 'hotcold run"),
        ("serve --model m", "'--model'. MODEL stands without an option. (see 'hotcold serve"),
        ("chat -p hi", "'-p'. (see 'hotcold chat --help')"),
        ("run --contxt 9", "'--contxt'. Did you mean '--context'?"),
        ("run -z", "'-z'. (see 'hotcold run --help')"),
    ],
)
def test_the_name_here_is_told(line: str, told: str) -> None:
    assert run_main(*line.split()).refusal.startswith(f"hotcold: error: No such option {told}")


def test_an_option_without_its_value_names_the_command() -> None:
    told = "Option '--prompt' requires an argument. (see 'hotcold generate --help')"
    assert run_main("generate", "--prompt").refusal == f"hotcold: error: {told}"


def test_each_name_stands_for_what_a_command_has_and_none_is_taken() -> None:
    context = click.Context(cli, info_name="hotcold")
    own, taken = set(), set()
    for name in ("run", "generate", "chat", "serve"):
        command = cli.get_command(context, name)
        assert command is not None
        for param in command.params:
            is_option = isinstance(param, click.Option)
            own |= {*param.opts} if is_option else {str(param.name).rstrip("s").upper()}
            taken |= {(name, option) for option in param.opts}
    assert own >= OTHER_NAMES.keys()
    others = {name for names in OTHER_NAMES.values() for name in names} - {"--prompt"}
    assert others.isdisjoint(option for _, option in taken)
