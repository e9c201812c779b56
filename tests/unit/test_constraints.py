"""Versions that work together, and the oldest ones, are what pyproject.toml admits."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What .ci/run installs: `.[test]`, which takes the page's packages along.
INSTALLED = [*PROJECT["dependencies"], *EXTRAS["ui"], *EXTRAS["test"]]


def requirements(lines: list[str]) -> list[Requirement]:
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.name != PROJECT["name"]]


def known() -> dict[str, Version]:
    """Name -> version, of the constraints file."""
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)  # no build, no place
    return {
        canonicalize_name(name): Version(version)
        for name, version in (line.split("==") for line in pinned)
    }


def test_every_package_has_a_known_version_that_is_admitted() -> None:
    versions = known()
    for one in requirements(INSTALLED):
        assert versions[canonicalize_name(one.name)] in one.specifier, one


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    lines = runpy.run_path(str(ROOT / ".ci/oldest.py"))["oldest"](PROJECT)
    oldest = {one.name: one.specifier for one in requirements(lines)}
    for one in requirements([*INSTALLED, *EXTRAS["cuda"], *EXTRAS["bench"]]):
        (bound,) = oldest[one.name]
        assert bound.operator == "==" and bound.version in one.specifier
        assert any(
            part.version == bound.version and part.operator == ">=" for part in one.specifier
        )
