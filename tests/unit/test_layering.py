"""Who may import whom (pyproject.toml, [tool.importlinter]), and what is imported when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hotcold.jobs.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def test_no_import_breaks_the_layers() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    found = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_every_package_is_shipped() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"hotcold"}
    linked = {path.name: path for path in (ROOT / "hotcold").iterdir() if path.is_symlink()}
    assert linked.keys() == folders - {"tests", "benchmarks", "examples"}
    for name, path in linked.items():
        assert path.readlink() == Path("..", name)
        for source in (ROOT / name).rglob("*.py"):
            assert (source.parent / "__init__.py").exists(), f"{source.parent} is not shipped"


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
