"""Which tests are quick, which come first, and what tests of several folders share."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.sweeps import mark_sweeps
from tests.tiny_checkpoint import GREEDY_TOKENS as GREEDY_TOKENS
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import make_tiny

TESTS = Path(__file__).parent

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

# `pytest -m quick`: all of these files and folders but what takes long, and one real answer.
QUICK = [
    "unit",
    "actors/test_lost_services.py",
    "cluster/test_job_files.py",
    "kernels/test_doorbell.py",
    "kernels/test_rows.py",
    "kernels/test_sampling.py",
    "e2e/test_generate_command.py::test_greedy_ids_are_those_of_transformers",
]
NOT_QUICK = [
    "unit/test_benchmarks.py",
    "unit/test_demo_corpus.py",
    "unit/test_kernel_cache.py",
    "unit/test_machine.py",
    "unit/test_page_parts.py",
    "unit/test_quantize_command.py",
    "unit/test_reference.py",
    "unit/test_solver.py",
    "unit/test_tokenizer.py",
]
# Files and folders whose tests share what takes long to start: one process runs them, in order.
TOGETHER = [
    [
        "e2e/fleet",
        "e2e/test_serve.py",
        "e2e/test_serve_lifetime.py",
        "e2e/test_agents.py",
        "e2e/test_ollama.py",
    ],
    ["actors/test_ray_system.py", "actors/test_scale.py", "actors/test_faults.py"],
    ["cluster/test_job.py", "cluster/test_two_hosts.py"],
    ["e2e/page"],
]
# Files that take longest, so that no process is left alone with one of them at the end. Those that
# begin at the same time need different kernels: one would wait for what the other compiles.
FIRST = [
    *TOGETHER[0],  # with a Ray of its own, so before `local_ray` is in the process
    *TOGETHER[1],
    "e2e/test_profile_command.py",
    *TOGETHER[2],
    "cluster/test_fleet_nodes.py",
    "actors/test_precompile.py",
    "kernels/test_other_cpus.py",
    "actors/test_stored_neurons.py",
    *TOGETHER[3],
    "actors/test_in_process.py",
    "actors/test_format_pairs.py",
    "unit/test_benchmarks.py",
    "e2e/test_generate_command.py",
    "e2e/test_train_predictors_command.py",
    "e2e",
    "kernels",
    "actors",
]

# A shell starts what runs in the background with Ctrl-C ignored, and so would every command that a
# test starts; a signal with a handler is given to them with its default action.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Where Python is told to keep no bytecode, hundreds of processes would each compile all sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test, and no command that one starts, takes the settings of whoever runs it.
TESTS_OWN = {"HOTCOLD_ALL_KERNELS", "HOTCOLD_CHROMIUM"}
for name in [name for name in os.environ if name.startswith("HOTCOLD_")]:
    if name not in TESTS_OWN:
        del os.environ[name]
os.environ["HOTCOLD_CONFIG"] = ""
# Commands use systems that run already; those of whoever runs the tests are not for them.
_SYSTEMS = tempfile.mkdtemp(prefix="hc-", dir="/tmp")
os.environ["XDG_RUNTIME_DIR"] = _SYSTEMS
atexit.register(shutil.rmtree, _SYSTEMS, ignore_errors=True)

# What is imported and collected stays, so there is no garbage among it to look for.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave all that out of later looks for garbage, too."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Torch, once it is imported, has one thread: several that wait for each other on busy cores
    take longer than one over arrays so small.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def is_below(path: Path, names: list[str]) -> bool:
    """Whether one of these files or folders is or holds `path`; a name may go on with ::."""
    own = path.relative_to(TESTS)
    return any(own.is_relative_to(name.partition("::")[0]) for name in names)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only what `-m quick` may take tests from."""
    if config.getoption("markexpr") != "quick" or collection_path.suffix != ".py":
        return None
    is_quick = is_below(collection_path, QUICK) and not is_below(collection_path, NOT_QUICK)
    return None if is_quick else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is quick and what is thorough, and begin with what takes longest."""

    @functools.cache
    def place(path: Path) -> int:
        return next((n for n, name in enumerate(FIRST) if is_below(path, [name])), len(FIRST))

    @functools.cache
    def quick_names(path: Path) -> list[str]:
        return [name for name in QUICK if is_below(path, [name]) and not is_below(path, NOT_QUICK)]

    mark_sweeps(items)
    for item in items:
        names = quick_names(item.path)
        is_quick = any("::" not in name or item.nodeid.endswith(name) for name in names)
        if is_quick and not item.get_closest_marker("thorough"):
            item.add_marker("quick")
    items.sort(key=lambda item: place(item.path))


class TogetherScheduling(LoadFileScheduling):
    """xdist's distribution by files, but for those that are to be together."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((names[0] for names in TOGETHER if is_below(TESTS.parent / file, names)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Distribute by files."""
    return TogetherScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyCheckpoint]:
    """tiny(variant, dtype="float32"): that checkpoint, the same one at each call."""

    @functools.cache
    def make(variant: str, dtype: str = "float32") -> TinyCheckpoint:
        return TinyCheckpoint(make_tiny(variant, tmp_path_factory.mktemp(variant), dtype=dtype))

    return make


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray that all tests of a process share which start systems in it; they leave it empty."""
    import ray

    from hotcold.actors.launch import start_local_ray
    from tests.actors.fork_server_with_torch import begin_with_torch

    begin_with_torch()
    start_local_ray(num_cpus=8, arena_bytes=128 << 20)  # four of them are kept systems'
    yield
    assert ray.is_initialized(), "a test has ended the Ray of the others"
    ray.shutdown()
