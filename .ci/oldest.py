"""Print, as constraints for pip, the oldest version of each package that pyproject.toml admits."""

import re
import tomllib
from itertools import chain
from pathlib import Path

_LEAST = re.compile(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)")


def oldest(project: dict) -> list[str]:
    """A line for each requirement with a lower bound, those of extras too."""
    needed = chain(project["dependencies"], *project["optional-dependencies"].values())
    return ["{}=={}".format(*found.groups()) for each in needed if (found := _LEAST.match(each))]


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    print(*oldest(tomllib.loads(text)["project"]), sep="\n")
