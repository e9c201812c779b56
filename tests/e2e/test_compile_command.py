"""`hotcold compile` leaves nothing to compile to the commands after it."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import run

_QUESTION = "What does textwrap.dedent do?"


def kernels(home: Path) -> set[Path]:
    return set(home.glob("hotcold/numba/*/*.nbc"))


@pytest.mark.thorough  # tests/actors/test_precompile.py looks at each kernel
def test_later_commands_compile_nothing(tmp_path: Path) -> None:
    """Neither for a question, nor for a long text, nor for a token drawn among likely ones."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = run("compile", "--json", changes=cache, timeout_s=800)
    assert done.status == 0, done.err
    assert "compiling kernels, once" in done.err.splitlines()[0]
    told, found = json.loads(done.out.splitlines()[-1]), kernels(tmp_path)
    assert told["compiled"] == len(found) > 100
    assert told["folder"] == str(tmp_path / "hotcold" / "numba")
    text = "def f(x): return x + 1; " * 30
    for arguments in (("--chat", "--prompt", _QUESTION), ("--prompt", text, "--top-p", "0.9")):
        answer = run("generate", *arguments, "--max-tokens", "4", changes=cache, timeout_s=300)
        assert answer.status == 0, answer.err
        assert "compiling" not in answer.err
    assert kernels(tmp_path) == found
    again = run("compile", changes=cache, timeout_s=300)
    assert again.status == 0 and again.out.startswith("all kernels had been compiled")
