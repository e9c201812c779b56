"""Options: their values, and what they are called elsewhere."""

from __future__ import annotations

from typing import Any

import click
import pytest

from hotcold.jobs.cli import cli
from hotcold.jobs.support.options import ADDRESSES, BYTES, TOKEN_IDS
from hotcold.jobs.support.other_names import OTHER_NAMES
from tests.e2e.commands import run_main


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("8g", 8 * 10**9), ("1.5 MiB", 3 << 19),
     ("7KiB", 7168), ("7 k", 7000), ("512", 512), (512, 512)],
)  # fmt: skip
def test_sizes_of_the_command_line(text: Any, size: int) -> None:
    assert BYTES.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1e9", "8 PiB", "8GiBs", "0x10", "1" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size"):
        BYTES.convert(text, None, None)


def test_lists_of_ids_and_addresses() -> None:
    assert TOKEN_IDS.convert("1, 2,3", None, None) == [1, 2, 3]
    assert TOKEN_IDS.convert(" ", None, None) == []
    with pytest.raises(click.BadParameter, match="is no list of token ids"):
        TOKEN_IDS.convert("1,,2", None, None)
    assert ADDRESSES.convert("10.0.0.1, 10.0.0.2,", None, None) == ("10.0.0.1", "10.0.0.2")


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
    """Of an option under Ollama's, llama.cpp's or vLLM's name."""
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
