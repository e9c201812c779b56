"""The default run takes a few tests of each sweep, and the thorough run the others."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.sweeps import mark_sweeps


class Sorted:
    """A plugin of pytest: the parameters of what the default run takes, and how many it leaves."""

    kept: list[str]
    num_others: int

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_sweeps(items)
        names = [item.name.partition("[")[2].rstrip("]") for item in items]
        is_kept = [not item.get_closest_marker("thorough") for item in items]
        self.kept = list(itertools.compress(names, is_kept))
        self.num_others = len(items) - len(self.kept)


def selected(folder: Path, test: str) -> tuple[list[str], int]:
    """What `Sorted` has of a file."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n  sweep\n")
    (folder / f"{folder.name}.py").write_text(f"import pytest\n{test}")
    found = Sorted()
    options = ["-p", "no:cacheprovider", "--import-mode=importlib", "--collect-only", "-q", "-n0"]
    pytest.main(
        [
            *options,
            f"--rootdir={folder}",
            "-c",
            f"{folder}/pytest.ini",
            str(folder / f"{folder.name}.py"),
        ],
        [found],
    )
    return found.kept, found.num_others


ALL = '@pytest.mark.parametrize("a", "xyz")\n@pytest.mark.parametrize("b", range(4))\n'


def test_each_value_of_each_parameter_once(tmp_path: Path) -> None:
    code = f"@pytest.mark.sweep\n{ALL}def test_it(a, b): pass\n"
    kept, others = selected(tmp_path, code)
    assert len(kept) == 4 and others == 8
    assert {value for name in kept for value in name.split("-")} == {*"xyz", *"0123"}


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ('sweep(a=["y"])', {"0-y", "1-y", "2-y", "3-y"}),
        ('sweep(a=["y"], other=[1])', {"0-y", "1-y", "2-y", "3-y"}),
        ('sweep(a=["y"], b=[2])', {"2-y"}),
        ('sweep(a=["y"], keep=2)', {"0-y", "2-y"}),
        ("thorough", set()),
        ("skipif(False, reason='')", {f"{b}-{a}" for a, b in itertools.product("xyz", range(4))}),
    ],
)
def test_what_is_named_is_kept(marker: str, expected: set[str], tmp_path: Path) -> None:
    code = f"@pytest.mark.{marker}\n{ALL}def test_it(a, b): pass\n"
    kept, others = selected(tmp_path, code)
    assert set(kept) == expected and len(kept) + others == 12


def test_of_a_file_with_tests_of_other_parameters(tmp_path: Path) -> None:
    code = f"""
pytestmark = pytest.mark.sweep(a=["z"])
@pytest.fixture(params=[1, 2])
def c(request): pass
{ALL}def test_it(a, b): pass
def test_alone(): pass
def test_fixture(c): pass
"""
    kept, others = selected(tmp_path, code)
    assert sorted(kept) == sorted(["0-z", "1-z", "2-z", "3-z", "", "1", "2"]) and others == 8


def test_a_value_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError):  # nothing was collected
        selected(tmp_path, f'@pytest.mark.sweep(a=["w"])\n{ALL}def test_it(a, b): pass\n')
    assert "its sweep keeps no test" in capsys.readouterr().err
