"""What only long prompts need: made late, awaited by the first of them, an error where it fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import ray

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.failures import CacheLost, RequestError
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.system import System
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.weights.rope_frequencies import inv_freq, rope_cache_path
from tests.actors.batching import batching, complete, greedy, start
from tests.actors.in_process import InProcessSystem
from tests.actors.kept_system import wait_until
from tests.tiny_checkpoint import Tiny

ROOT = Path(__file__).resolve().parents[2]
ROPES = [
    RopeConfig(10_000.0),
    RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    RopeConfig(300.0, "linear", 2.0),
]
SHORT_THEN_LONG = """
import json, sys
from pathlib import Path
from tests.actors.in_process import InProcessSystem

with InProcessSystem(Path(sys.argv[1]), 2, 1) as system:
    engine, has_torch = system.engine("exact"), []
    for size in (1, 32, 33):
        engine.step([1] * size, range(size), [0] * size)
        has_torch.append("torch" in sys.modules)
print(json.dumps(has_torch))
"""


def test_kept_angles_are_torchs_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged ones are computed again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rope, head_dim in itertools.product(ROPES, (2, 80)):
        expected = rope.inv_freq(head_dim)
        for _ in range(2):
            found = inv_freq(rope, head_dim)
            assert found.dtype == np.float32 and found.tobytes() == expected.tobytes()
    rope = ROPES[0]
    expected, path = inv_freq(rope, 16), rope_cache_path(rope, 16)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"0000"):
        path.write_bytes(content)
        np.testing.assert_array_equal(inv_freq(rope, 16), expected)
        assert path.read_bytes() == whole
    others = [rope_cache_path(replace(rope, theta=9999.0), 16), rope_cache_path(rope, 18)]
    with monkeypatch.context() as patch:  # as in a guest whose hypervisor leaves features out
        patch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap())
        others.append(rope_cache_path(rope, 16))
    assert len({path, *others}) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    np.testing.assert_array_equal(inv_freq(rope, 16), expected)


def test_steps_and_prompts_do_without_torch(tiny: Tiny) -> None:
    """Where the rope's angles are kept: a first start computes them."""
    path = tiny("llama-gqa").path
    with InProcessSystem(path, 2, 1):
        pass
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SHORT_THEN_LONG, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, False]


def test_a_long_prompt_says_what_fails(tiny: Tiny) -> None:
    """The driver's hook is called before long prompts and before counts, and for nothing else."""
    checkpoint = tiny("llama-relu")
    asked: list[str] = []
    problems: list[Exception] = [RequestError("the gpu service failed: ImportError: no code")]

    def prepare() -> None:
        asked.append("asked")
        if problems:
            raise problems.pop()

    with InProcessSystem(checkpoint.path, num_positions=128) as system:
        config = SystemConfig(str(checkpoint.path), context_length=128, kv_dtype="float32")
        driver = Driver(config, system.exchange, system.topology, prepare)

        def ids_after(prompt: list[int]) -> list[int]:
            return complete(driver, greedy(prompt, 2)).ids

        short, long = [1] * (MATRIX_TOKENS - 1), [1] * MATRIX_TOKENS
        ids_after(short)
        assert not asked
        with pytest.raises(RequestError, match=r"^the gpu service failed: ImportError: no code$"):
            ids_after(long)
        ids_after(short)
        assert asked == ["asked"]
        expected = ids_after(long)
        problems.append(CacheLost("the gpu service was replaced"))
        assert ids_after(long) == expected
        before = len(asked)
        driver.profile_window([1, 2, 3], [])
        assert len(asked) > before
        driver.close()


def test_others_go_on_while_services_prepare(tiny: Tiny) -> None:
    """A long prompt begins once they have; a short one's tokens do not wait for that."""
    ready, asked = threading.Event(), []

    def begin(wait_s: float) -> bool:
        asked.append(wait_s)
        return ready.wait(wait_s)

    long, short = greedy([1] * 64, 20, "long"), greedy([1, 2, 3], 20, "short")
    with batching(tiny("llama-gqa"), "dense") as (_, driver):
        expected = [complete(driver, one).ids for one in (long, short)]
        driver.engine.begin_matmul = begin
        layers: list[bool] = []
        inner = driver.engine.run_layer

        def run_layer(*given: Any) -> None:
            layers.append(ready.is_set())
            inner(*given)

        driver.engine.run_layer = run_layer  # type: ignore[assignment]
        waiting = start(driver, long)
        assert complete(driver, short).ids == expected[1]
        assert not layers and 0.0 in asked and max(asked) > 0
        ready.set()
        assert waiting.end().ids == expected[0]
        assert layers and all(layers)


@pytest.mark.usefixtures("local_ray")
def test_long_prompts_are_prepared_for_when_idle(tiny: Tiny) -> None:
    """Also by services that replace lost ones, which multiply as those did."""
    config = SystemConfig(
        str(tiny("llama-gqa", "float16").path), context_length=128, prefill_chunk=64
    )
    short, long = greedy([1, 2, 3], 5), greedy([1] * 64, 5)
    with System.start(config) as system:

        def is_prepared(service: Any) -> bool:
            return bool(service._prompt_scratch)

        def of_services(function: Callable[[Any], Any]) -> list[Any]:
            handles = system.driver.__ray_call__.remote(
                lambda host: host.services.connection.handles
            )
            return [ray.get(each.__ray_call__.remote(function)) for each in ray.get(handles)]

        assert wait_until(lambda: all(of_services(lambda host: is_prepared(host._service))))
        system.complete(short)
        os.kill(system.call("processes")["cpu0"], signal.SIGKILL)
        expected = system.complete(long).ids
        os.kill(system.call("processes")["cpu0"], signal.SIGKILL)
        assert system.complete(long).ids == expected
