"""Numbers of bytes as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from hotcold.actors.protocol.options import bytes_of
from hotcold.model.byte_sizes import binary_text, size_text


@pytest.mark.parametrize(
    ("num_bytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (99, "99 B", "99 B"),
        (4096, "4.1 kB", "4.0 KiB"),
        (27_300_000, "27.3 MB", "26.0 MiB"),
        (250_000_000, "250.0 MB", "238.4 MiB"),
        (999_960_000, "1.00 GB", "953.6 MiB"),
        (2**30 - 1, "1.07 GB", "1.00 GiB"),
        (17_000_000_000, "17.00 GB", "15.83 GiB"),
    ],
)
def test_the_unit_is_that_of_which_there_is_one(num_bytes: int, decimal: str, binary: str) -> None:
    assert (size_text(num_bytes), binary_text(num_bytes)) == (decimal, binary)


def test_a_size_is_read_back_within_a_twentieth() -> None:
    for num_bytes in np.random.default_rng(0).uniform(0, 13, 2000):
        size = int(10**num_bytes)
        for text in (size_text(size), binary_text(size)):
            read = bytes_of(re.sub(" ", "", text))
            assert abs(Fraction(read, size) - 1) < Fraction(1, 20), (size, text)
