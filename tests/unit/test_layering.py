"""Who may import whom, read from the sources: the picture in docs/architecture.md, checked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_KERNELS = {"numba_kernels", "cuda_kernels"}
_OFFLINE = _KERNELS | {"model", "predictors", "placement"}
MAY_IMPORT: dict[str, set[str]] = {
    "numba_kernels": set(),
    "cuda_kernels": set(),
    "model": _KERNELS,
    "predictors": _KERNELS | {"model"},
    "placement": _KERNELS | {"model"},
    "actors": _OFFLINE,
    "ui": _OFFLINE | {"actors"},
    "jobs": _OFFLINE | {"actors", "ui"},
    "benchmarks": _OFFLINE | {"actors", "ui", "jobs"},
    "tests": _OFFLINE | {"actors", "ui", "jobs"},
    "demo": set(),
}


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it."""

    module: str
    line: int
    at_top_level: bool


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Yield every import. Those under TYPE_CHECKING count for layering but are never executed."""
    yield from _imports_below(tree, at_top_level=True)


def _imports_below(node: ast.AST, at_top_level: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_top_level)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield Import(child.module, child.lineno, at_top_level)
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deferred |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _imports_below(child, at_top_level and not deferred)


def violations(path: str, source: str) -> list[str]:
    """Return what is wrong with one file. `path` is relative to the checkout."""
    tree = ast.parse(source)
    found = [text for entry in imports_of(tree) if (text := _wrong_import(path, entry))]
    found += _relative_imports(tree)
    if path != "actors/launch.py" and not path.startswith("tests/"):
        found += _uses_of_ray_remote(tree)
    return [f"{path}:{text}" for text in found]


def _wrong_import(path: str, entry: Import) -> str:
    package, target = path.split("/")[0], entry.module.split(".")[0]
    where = f"{entry.line}: imports {entry.module}"
    if target in MAY_IMPORT and target != package and target not in MAY_IMPORT[package]:
        return f"{where}, which {package} may not"
    if target in ("cupy", "cupyx"):
        if not path.startswith(("cuda_kernels/", "actors/gpu_service", "tests/gpu/")):
            return f"{where} outside of cuda_kernels/ and the GPU service"
        if entry.at_top_level:
            return f"{where} at the top: import it where a GPU is used"
    if target == "gradio" and not path.startswith(("ui/", "tests/")):
        return f"{where} outside of ui/"
    return ""


def _relative_imports(tree: ast.Module) -> list[str]:
    return [
        f"{node.lineno}: relative import; write the full name"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def _uses_of_ray_remote(tree: ast.Module) -> list[str]:
    return [
        f"{node.lineno}: ray.remote outside of actors/launch.py"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "ray.remote")
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "ray"
            and any(alias.name == "remote" for alias in node.names)
        )
    ]


def source_files() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def test_no_file_breaks_the_layering() -> None:
    files = source_files()
    assert len(files) > 20
    found = [
        text
        for path in files
        for text in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


def test_every_package_is_known_and_shipped() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders <= set(MAY_IMPORT)
    settings = (ROOT / "pyproject.toml").read_text()
    for name in folders - {"tests", "benchmarks"}:
        assert f'"{name}",' in settings


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("numba_kernels/a.py", "import model.config", "numba_kernels may not"),
        ("numba_kernels/a.py", "from cuda_kernels import device", "numba_kernels may not"),
        ("model/a.py", "def f():\n    from actors.driver import Driver", "a.py:2: imports actors"),
        ("model/a.py", "if TYPE_CHECKING:\n    import placement", "model may not"),
        ("predictors/a.py", "from placement.plan import Plan", "predictors may not"),
        ("placement/a.py", "import predictors", "placement may not"),
        ("actors/a.py", "import jobs.cli", "actors may not"),
        ("ui/a.py", "import jobs.cli", "ui may not"),
        ("jobs/a.py", "from benchmarks.x import y", "jobs may not"),
        ("tests/unit/a.py", "import benchmarks", "tests may not"),
        ("jobs/a.py", "from tests.unit import helper", "jobs may not"),
        ("model/a.py", "from .config import ModelConfig", "relative import"),
        ("actors/driver.py", "@ray.remote\nclass A: pass", "ray.remote outside"),
        ("actors/driver.py", "@ray.remote(num_cpus=1)\nclass A: pass", "ray.remote outside"),
        ("jobs/a.py", "from ray import remote", "ray.remote outside"),
        ("cuda_kernels/a.py", "import cupy as cp", "at the top"),
        ("cuda_kernels/a.py", "try:\n    import cupy\nexcept ImportError: pass", "at the top"),
        ("cuda_kernels/a.py", "class A:\n    import cupy", "at the top"),
        ("model/a.py", "def f():\n    import cupy", "outside of cuda_kernels/"),
        ("actors/driver.py", "def f():\n    from cupy import cuda", "outside of cuda_kernels/"),
        ("jobs/a.py", "def f():\n    import gradio", "outside of ui/"),
    ],
)
def test_violations_are_caught(path: str, source: str, expected: str) -> None:
    found = violations(path, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("model/a.py", "import numpy\nfrom numba_kernels.ffn import ffn"),
        ("actors/launch.py", "import ray\nActor = ray.remote(object)"),
        ("actors/gpu_service_cuda.py", "def f():\n    import cupy"),
        ("cuda_kernels/a.py", "if TYPE_CHECKING:\n    import cupy"),
        ("ui/chat.py", "import gradio\nfrom actors.system import System"),
        ("jobs/cmd_serve.py", "def f():\n    from ui.chat import page"),
    ],
)
def test_allowed_imports_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize("module", ["jobs.cmd_generate", "jobs.cmd_serve", "actors.driver_host"])
def test_what_starts_does_not_wait_for_torch(module: str) -> None:
    """It takes a second to import: services do it while they load."""
    program = f"import sys, {module}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout == "False\n", found.stderr
