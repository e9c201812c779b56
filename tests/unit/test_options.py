"""Values of the command line: sizes, ids and addresses."""

from __future__ import annotations

from typing import Any

import click
import pytest

from hotcold.jobs.support.options import ADDRESSES, BYTES, TOKEN_IDS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("2TB", 2 * 10**12),
        ("7KiB", 7168),
        ("7 k", 7000),
        ("512", 512),
        ("512B", 512),
        (512, 512),
    ],
)
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
