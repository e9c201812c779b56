"""Who may import whom, read from the sources: the picture in docs/architecture.md, checked."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotcold.jobs.cli import COMMANDS

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
    "benchmarks": _OFFLINE | {"actors", "ui", "jobs", "tests"},
    "tests": _OFFLINE | {"actors", "ui", "jobs"},
    "demo": set(),
}

# Inside a package: room -> the rooms of the same package that it may import. A room is a folder, or
# a file at the package's top.
ROOMS: dict[str, dict[str, set[str]]] = {
    "actors": {
        "protocol": set(),
        "telemetry": set(),
        "exchange": {"protocol"},
        "setup.neurons": {"protocol"},
        "setup.memory": {"protocol", "setup.neurons"},
        "setup": {"exchange", "protocol", "setup.memory", "setup.neurons"},
        "cpu": {"exchange", "protocol", "telemetry"},
        "gpu": {"cpu", "exchange", "protocol"},
        "gpu.cuda": {"gpu", "exchange", "protocol", "setup.memory", "setup.neurons"},
        "driver.text": {"protocol"},
        "driver": {
            "driver.text",
            "exchange",
            "protocol",
            "setup",
            "setup.neurons",
            "telemetry",
        },
        "processes": {
            "cpu",
            "driver",
            "exchange",
            "gpu",
            "gpu.cuda",
            "protocol",
            "setup",
            "setup.memory",
            "setup.neurons",
            "telemetry",
        },
        "private_ray": set(),
        "launch": {"private_ray", "processes", "protocol", "setup"},
        "system": {"launch", "exchange", "protocol", "setup.neurons"},
        "client": {"system", "exchange", "protocol"},
    },
    "numba_kernels": {
        "": set(),
        "compiler": {"called_kernels", "numba_parts", "one_compiler"},
        "called_kernels": {"kernel_cache"},
        "formats": set(),
        "kernel_cache": {"own_cache"},
        "numba_parts": {"kernel_cache"},
        "one_compiler": {"kernel_cache", "own_cache"},
        "own_cache": set(),
        "checks": {"formats"},
        "ir": {"compiler", "formats"},
        "load": {"checks", "compiler", "formats", "ir"},
        "decode": {"checks", "compiler", "formats", "ir", "load"},
        "prompt": {"compiler", "decode", "ir"},
        "serve": {"checks", "compiler", "decode", "formats"},
        "storage": {"compiler", "decode", "ir", "serve"},
        "measure": {"checks", "compiler", "decode", "ir", "serve", "storage"},
    },
    "model": {
        "errors": set(),
        "current_folder": set(),
        "hot_share": set(),
        "limits": set(),
        "published_sparsity": {"config"},
        "file_state": set(),
        "mapped_file": {"errors"},
        "gguf": {"errors", "file_state", "mapped_file"},
        "config": {"errors", "gguf"},
        "files": {"config", "errors", "file_state", "gguf", "mapped_file"},
        "weights": {"config", "errors", "files", "gguf", "limits"},
        "bundles": {"config", "errors", "files", "weights"},
        "text": {"config", "current_folder", "errors", "files", "gguf"},
        "sampling": {"config", "errors"},
        "torch_activations": set(),
        "synthetic": {
            "config",
            "errors",
            "files",
            "hot_share",
            "limits",
            "torch_activations",
        },
        "reference": {"config", "files", "torch_activations", "weights"},
    },
    "predictors": {
        "magnitude": set(),
        "sign": set(),
        "lowrank": set(),
        "quality": set(),
        "sign_team": {"sign"},
        "predictor": {"sign", "sign_team"},
        "predictor_file": {"lowrank", "predictor", "quality", "sign"},
        "in_checkpoint": {"lowrank", "predictor_file"},
        "powerinfer": {"in_checkpoint", "lowrank", "predictor_file"},
        "read_ahead": {"predictor_file", "sign", "sign_team"},
        "fitting": {"lowrank", "predictor_file", "quality", "sign"},
    },
    "placement": {
        "machine": set(),
        "hottest": set(),
        "memory": set(),
        "plan": set(),
        "profile": set(),
        "storage": set(),
        "threads": {"machine"},
        "crossover": {"machine"},
        "solver": {"machine", "threads"},
        "report": {"solver"},
        "assumptions": {"machine", "plan", "profile", "solver"},
        "stated": {"profile", "solver"},
        "planner": {"assumptions", "machine", "plan", "profile", "report", "solver"},
    },
    "jobs": {
        "settings": set(),
        "support": {"settings"},
        "kept": {"settings", "support"},
        "chat": {"support"},
        "top": {"kept", "support"},
        "requests": set(),
        "bench": {"settings", "support"},
        "profile": {"support"},
        "serve": {"kept", "support"},
        "commands": {"chat", "kept", "profile", "serve", "settings", "support"},
        "cli": {"kept", "settings", "support"},
        "demo": {"cli", "support"},
        "generate": {"cli", "kept", "requests", "settings", "support"},
        "keeper": {"cli", "kept", "support"},
        "stop": {"cli", "support"},
        "train_demo": {"demo"},
    },
    "ui": {
        "strict": set(),
        "api.tools": {"strict"},
        "api": {"api.tools", "strict"},
        "api.embeddings": {"api", "strict"},
        "api.ollama": {
            "api",
            "api.embeddings",
            "api.tools",
            "described",
            "models",
            "strict",
        },
        "api.responses": {"api", "api.tools", "strict"},
        "models": {"api", "api.embeddings"},
        "telemetry": set(),
        "page": {"api", "telemetry"},
        "headers": set(),
        "keys": set(),
        "gate": {"api", "headers", "keys"},
        "connections": {"api"},
        "access_log": set(),
        "described": set(),
        "own": {"api", "strict", "telemetry"},
        "serving": {"access_log", "api", "connections", "gate"},
        "server": {
            "api",
            "api.embeddings",
            "api.ollama",
            "api.responses",
            "described",
            "models",
            "page",
        },
    },
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
            for alias in child.names:
                module = f"{child.module}.{alias.name}"
                yield Import(
                    module if _is_ours(module) else child.module, child.lineno, at_top_level
                )
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deferred |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _imports_below(child, at_top_level and not deferred)


def _is_ours(module: str) -> bool:
    """Whether `module` is a file or folder of this checkout, not a name in one."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def room_of(module: str) -> str:
    """Return the room that a module of one of the packages is in, without the package."""
    package, *inner = module.split(".")
    known = ROOMS.get(package, {})
    while inner and ".".join(inner) not in known:
        inner.pop()
    return ".".join(inner)


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
    if target == package and package in ROOMS:
        here = room_of(path.removesuffix(".py").replace("/", "."))
        there = room_of(entry.module)
        if there and there != here and there not in ROOMS[package].get(here, set()):
            return f"{where}, which {package}/{here} may not"
    if target in ("cupy", "cupyx"):
        if not path.startswith(("cuda_kernels/", "actors/gpu/", "tests/gpu/")):
            return f"{where} outside of cuda_kernels/ and actors/gpu/"
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
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "remote"
            and isinstance(node.value, ast.Name)
            and node.value.id == "ray"
        )
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


def test_every_room_is_known() -> None:
    for package, rooms in ROOMS.items():
        files = [path for path in source_files() if path.is_relative_to(ROOT / package)]
        for path in files:
            module = path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
            if path.name != "__init__.py":
                assert room_of(module) in rooms, f"{module} stands in no known room"
        assert {
            room for room in rooms if not (ROOT / package / room.replace(".", "/")).is_dir()
        } <= {path.stem for path in (ROOT / package).glob("*.py")}


def import_graph() -> dict[str, set[str]]:
    """Return every file's imports of other files of this checkout, deferred ones too."""
    graph: dict[str, set[str]] = {}
    for path in source_files():
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        name = name.removesuffix(".__init__")
        modules = {entry.module for entry in imports_of(ast.parse(path.read_text()))}
        graph[name] = {module for module in modules if module.split(".")[0] in MAY_IMPORT}
    return {name: {m for m in modules if m in graph} for name, modules in graph.items()}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the names along one circle, or nothing where there is none."""
    done: set[str] = set()

    def layer_state(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := layer_state(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := layer_state(name, []))), [])


def test_no_imports_run_in_a_circle() -> None:
    graph = import_graph()
    assert graph["hotcold.actors.driver.driver"] >= {"hotcold.actors.driver.engine"}
    assert circle_in(graph) == []
    for rooms in ROOMS.values():
        assert circle_in(rooms) == []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_package_is_known_and_shipped() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders <= set(MAY_IMPORT)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    shipped = settings["packages"]["find"]["include"]  # name* ships all folders with a file of ours
    assert set(shipped) == {f"{name}*" for name in folders - {"tests", "benchmarks"}}
    for path in source_files():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} is not shipped"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("numba_kernels/a.py", "import hotcold.model.config.model_config", "numba_kernels may not"),
        ("numba_kernels/a.py", "from hotcold.cuda_kernels import device", "numba_kernels may not"),
        (
            "model/a.py",
            "def f():\n    from hotcold.actors.driver.driver import Driver",
            "a.py:2: imports actors",
        ),
        ("model/a.py", "if TYPE_CHECKING:\n    import placement", "model may not"),
        ("predictors/a.py", "from hotcold.placement.plan import Plan", "predictors may not"),
        ("placement/a.py", "import predictors", "placement may not"),
        ("actors/a.py", "import hotcold.jobs.cli", "actors may not"),
        ("ui/a.py", "import hotcold.jobs.cli", "ui may not"),
        ("jobs/a.py", "from benchmarks.x import y", "jobs may not"),
        ("tests/unit/a.py", "import benchmarks", "tests may not"),
        ("jobs/a.py", "from tests.unit import helper", "jobs may not"),
        ("model/a.py", "from .config import ModelConfig", "relative import"),
        ("actors/driver/driver.py", "@ray.remote\nclass A: pass", "ray.remote outside"),
        ("actors/driver/driver.py", "@ray.remote(num_cpus=1)\nclass A: pass", "ray.remote outside"),
        ("jobs/a.py", "from ray import remote", "ray.remote outside"),
        ("cuda_kernels/a.py", "import cupy as cp", "at the top"),
        ("cuda_kernels/a.py", "try:\n    import cupy\nexcept ImportError: pass", "at the top"),
        ("cuda_kernels/a.py", "class A:\n    import cupy", "at the top"),
        ("model/a.py", "def f():\n    import cupy", "outside of cuda_kernels/"),
        (
            "actors/driver/driver.py",
            "def f():\n    from cupy import cuda",
            "outside of cuda_kernels/",
        ),
        ("jobs/a.py", "def f():\n    import gradio", "outside of ui/"),
        ("actors/cpu/a.py", "from hotcold.actors.driver import engine", "actors/cpu may not"),
        (
            "actors/driver/text/a.py",
            "import hotcold.actors.driver.engine",
            "actors/driver.text may not",
        ),
        (
            "actors/driver/a.py",
            "from hotcold.actors.processes.cluster import x",
            "actors/driver may not",
        ),
        (
            "numba_kernels/ir/a.py",
            "from hotcold.numba_kernels.decode import ffn",
            "kernels/ir may not",
        ),
        (
            "model/files/a.py",
            "def f():\n    from hotcold.model.weights import ffn",
            "model/files may not",
        ),
        ("placement/machine/a.py", "import hotcold.placement.planner", "placement/machine may not"),
    ],
)
def test_violations_are_caught(path: str, source: str, expected: str) -> None:
    found = violations(path, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("model/a.py", "import numpy\nfrom hotcold.numba_kernels.decode.ffn import ffn"),
        ("actors/launch.py", "import ray\nActor = ray.remote(object)"),
        ("actors/gpu/cuda/a.py", "def f():\n    import cupy"),
        ("cuda_kernels/a.py", "if TYPE_CHECKING:\n    import cupy"),
        ("ui/chat.py", "import gradio\nfrom hotcold.actors.system import System"),
        ("jobs/commands/serve.py", "def f():\n    from hotcold.ui.page import page"),
    ],
)
def test_allowed_imports_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_what_starts_does_not_wait_for_torch() -> None:
    """It takes a second to import, and short prompts do without it."""
    names = [
        "hotcold.jobs.commands.generate",
        "hotcold.jobs.commands.serve",
        "hotcold.actors.launch",
        "hotcold.actors.driver.driver",
        "hotcold.actors.cpu.cpu_service",
        "hotcold.actors.attention.attention_service",
    ]
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n"
    program += "    importlib.import_module(name)\n    print(name, 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == [f"{name} False" for name in names], found.stderr


def test_no_commands_help_waits_for_what_systems_need() -> None:
    """Nor does completing an option: Ray, Numba and torch take a second or two to import."""
    program = (
        "import sys, click\nfrom hotcold.jobs.cli import COMMANDS, cli\n"
        "from hotcold.numba_kernels import checks\n"
        "for name in COMMANDS:\n    cli.get_command(click.Context(cli), name)\n"
        "    print(name, *{'torch', 'ray', 'numba', 'llvmlite', 'scipy'} & sys.modules.keys())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == list(COMMANDS), found.stderr


def test_kernels_have_njit_from_where_it_is_told_what_to_do() -> None:
    """Numba's own would keep and compile them otherwise, where it was imported first."""
    folder = ROOT / "numba_kernels"
    from_numba = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "numba"
        and "njit" in {alias.name for alias in node.names}
    ]  # fmt: skip
    assert from_numba == ["compiler.py"]
