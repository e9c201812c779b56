"""Systems that stay: found by programs and commands alike, and by the examples."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotcold import LLM, SamplingParams
from tests.e2e.commands import CHECKOUT, environment, processes_left, ray_folder

WAIT_S = 600.0
GREEDY = SamplingParams(temperature=0, max_tokens=12)
USES = """
import sys
from hotcold import LLM, SamplingParams
result = LLM().generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=12))
print(list(result.token_ids), {"torch", "numba", "ray", "numpy"} & sys.modules.keys())
"""
EXAMPLES = {
    "batch.py": "Join two or more pathname components",
    "chat.py": "Join two or more pathname components",
    "tools.py": "add({",
    "search.py": "Remove leading whitespace from every line of a text.",
    "sparsity.py": "layer  3",
    "structured.py": "'returns': '",
    "ray_program.py": "textwrap.dedent: Remove any common leading whitespace",
}


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """The environment of programs, with a folder of running systems and of Ray of its own."""
    with ray_folder() as ray, pytest.MonkeyPatch.context() as patch:
        systems = ray / "run"
        systems.mkdir(mode=0o700)
        found = environment(ray, {"XDG_RUNTIME_DIR": str(systems)})
        for name in ("XDG_RUNTIME_DIR", "RAY_TMPDIR", "PYTHONPATH"):
            patch.setenv(name, found[name])
        yield found
        command(found, "stop")
        assert processes_left(ray) == []


@pytest.fixture(scope="module")
def llm(places: dict[str, str]) -> Iterator[LLM]:
    with LLM(keep="10m", progress=False) as made:
        yield made


def command(places: dict[str, str], *arguments: str) -> str:
    return python(places, "-m", "hotcold.jobs.cli", *arguments)


def python(places: dict[str, str], *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=places, input=stdin, capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_and_a_command_find_it(places: dict[str, str], llm: LLM) -> None:
    """And need little for it."""
    expected = list(llm.generate("def add(a, b):", GREEDY).token_ids)
    assert python(places, "-c", USES) == f"{expected} set()\n"
    asked = "--prompt", "def add(a, b):", "--temperature", "0", "--max-tokens", "12", "--json"
    assert json.loads(command(places, "generate", *asked).splitlines()[-1])["ids"] == expected


def test_a_handle_is_sent(llm: LLM) -> None:
    with pickle.loads(pickle.dumps(llm)) as handle:
        assert handle.generate("a", GREEDY).token_ids == llm.generate("a", GREEDY).token_ids


IN_RAY = "ray_program.py"  # in tests/api/test_children.py, too


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name == IN_RAY else [])
        for name in EXAMPLES
    ],
)
def test_examples(name: str, places: dict[str, str], llm: LLM) -> None:
    path = CHECKOUT / "examples" / name
    out = python(places, str(path), stdin="What does os.path.join do?\n")
    assert EXAMPLES[name] in out
    assert len(path.read_text().splitlines()) <= 55


def test_each_example_is_run() -> None:
    names = {path.name for path in Path(CHECKOUT, "examples").glob("*.py")}
    assert names == EXAMPLES.keys() | {"ray_serve_llm.py"}  # by tests/e2e/fleet/
