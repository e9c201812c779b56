"""What only long prompts need: had late, chosen once, and told where it cannot be had."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from hotcold.actors.attention.arrays import inv_freq, rope_cache_path
from hotcold.actors.cpu import matmul, matmul_choice
from hotcold.actors.cpu.lazy_matmul import LazyMatmul
from hotcold.actors.driver.driver import Driver
from hotcold.actors.exchange.watch import ActorWatch
from hotcold.actors.processes.system_services import SystemServices
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import CacheLost, RequestError, ServiceLost
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS, MatmulChoice
from hotcold.actors.setup.connection import Connection
from hotcold.actors.system import System
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.sampling import SamplingParams
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
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


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
@pytest.mark.parametrize("head_dim", [2, 16, 80, 128])
def test_kept_angles_are_torchs_bits(
    rope: RopeConfig, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = rope.inv_freq(head_dim)
    for _ in range(2):
        found = inv_freq(rope, head_dim)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    monkeypatch.setattr(RopeConfig, "inv_freq", None)  # it is not asked again
    np.testing.assert_array_equal(inv_freq(rope, head_dim), expected)


def test_damaged_angles_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rope = ROPES[0]
    expected, path = inv_freq(rope, 16), rope_cache_path(rope, 16)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"0000"):
        path.write_bytes(content)
        np.testing.assert_array_equal(inv_freq(rope, 16), expected)
        assert path.read_bytes() == whole
    others = [rope_cache_path(replace(rope, theta=9999.0), 16), rope_cache_path(rope, 18)]
    assert len({path, *others}) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    np.testing.assert_array_equal(inv_freq(rope, 16), expected)


def test_steps_of_few_tokens_do_without_torch(tiny: Tiny) -> None:
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
    assert json.loads(done.stdout) == [False, False, True]


def test_products_are_made_once_and_chosen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(matmul.Matmul):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(matmul, "Matmul", Counted)
    wide = MatmulChoice(bfloat16=False, integers=False)
    late = LazyMatmul(2, [np.dtype(np.uint16)], (), wide)
    assert not made
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(late.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == made * 4
    late.choose(MatmulChoice(bfloat16=True, integers=False))
    assert late.get() is made[0] and made[0]._choice.bfloat16
    late.close()
    with pytest.raises(RuntimeError), made[0].at_once():
        made[0].then(lambda thread: None)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where this machine keeps its choice of products: nowhere yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matmul_choice._choose.cache_clear()
    yield tmp_path / "hotcold" / "products"
    matmul_choice._choose.cache_clear()


def test_starts_choose_alike_however_the_first_trial_went(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    def choose_anew(float32_s: float) -> MatmulChoice:
        times = itertools.chain([float32_s, 1.0], itertools.repeat(1.0))
        monkeypatch.setattr(matmul_choice, "_fastest", lambda product: next(times))
        matmul_choice._choose.cache_clear()
        return matmul_choice.choose_matmul()

    slow = choose_anew(100.0)
    assert slow.bfloat16
    assert choose_anew(0.001) == slow
    (file,) = kept.iterdir()
    for damage in ("", "{}", '{"bfloat16": 1, "integers": 0}', "[]"):
        file.write_text(damage)
        assert not choose_anew(0.001).bfloat16
    assert [file] == list(kept.iterdir())


def test_threads_that_ask_at_once_are_told_the_same(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    answers = iter([1.0, 2.0] * 100)
    monkeypatch.setattr(matmul_choice, "_fastest", lambda product: next(answers))
    found: list[MatmulChoice] = []
    threads = [
        threading.Thread(target=lambda: found.append(matmul_choice.choose_matmul()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1


def test_a_long_prompt_tells_what_cannot_be_had(tiny: Tiny) -> None:
    """The driver's hook is called before long prompts and before counts, and for nothing else."""
    checkpoint = tiny("llama-relu")
    asked: list[str] = []
    problems: list[Exception] = [RequestError("the gpu service failed: ImportError: no torch")]

    def prepare() -> None:
        asked.append("asked")
        if problems:
            raise problems.pop()

    with InProcessSystem(checkpoint.path, num_positions=128) as system:
        config = SystemConfig(str(checkpoint.path), context_length=128, kv_dtype="float32")
        driver = Driver(config, system.exchange, prepare_matmul=prepare)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

        def ids_after(prompt: list[int]) -> list[int]:
            *_, last = driver.generate(GenerateRequest(sampling, prompt_ids=prompt))
            assert last.result is not None
            return last.result.ids

        short, long = [1] * (MATRIX_TOKENS - 1), [1] * MATRIX_TOKENS
        ids_after(short)
        assert not asked
        with pytest.raises(RequestError, match=r"^the gpu service failed: ImportError: no torch$"):
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


class Handle:
    """A service's actor that chooses `choice`, and keeps what it is told to use."""

    def __init__(self, choice: MatmulChoice) -> None:
        self.used: list[MatmulChoice] = []
        self.choose_matmul = SimpleNamespace(remote=lambda: choice)
        self.use_matmul = SimpleNamespace(remote=self.used.append)
        self.ping = SimpleNamespace(remote=lambda: pytest.fail("all have answered"))


def test_services_agree_on_what_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chooses; what one cannot none does. Fresh processes are told by the layout."""
    choices = [MatmulChoice(True, True, True), MatmulChoice(True, False, True)]
    handles = [Handle(choice) for choice in choices]
    connection: Any = Connection.__new__(Connection)
    connection.handles, connection.names = handles, ["gpu", "cpu0"]
    connection.specs = [None, None]  # one a service

    class Replacer:
        layout: Any = None

        def change_layout(self, layout: Any) -> None:
            self.layout = layout

    connection.watch, connection.replacer = ActorWatch(connection.names, handles), Replacer()
    connection.watch.starting = False
    connection._layout = ArenaLayout(2, 1, 1, 1, 1, 1, 1, 1)
    monkeypatch.setattr(ray, "wait", lambda calls, **options: (list(calls), []))
    monkeypatch.setattr(ray, "get", lambda call, timeout: call)
    agreed = MatmulChoice(True, False, True)
    assert connection.agree_on_matmul() == agreed
    assert [handle.used for handle in handles] == [[agreed], [agreed]]
    assert connection.replacer.layout.products == agreed
    assert not connection.watch.starting

    def lost(call: Any, timeout: float) -> Any:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(ServiceLost, match="the gpu service died"):
        connection.agree_on_matmul()


def test_a_lost_service_is_replaced_before_the_rest_agree() -> None:
    host: Any = SystemServices.__new__(SystemServices)
    host.system = SystemConfig("somewhere")
    choice, renewed = MatmulChoice(True, False), []
    answers: list[Any] = [ServiceLost(1, "the cpu0 service died; start again"), choice]

    class Services:
        def agree_on_matmul(self) -> MatmulChoice:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            found: MatmulChoice = answer
            return found

    class Exchange:
        def renew(self, service: int, cause: str) -> None:
            renewed.append((service, cause))

    host.connection, host.exchange = Services(), Exchange()
    host.prepare_matmul()
    host.prepare_matmul()  # agreed, for the system's life
    assert renewed == [(1, "the cpu0 service died")]
    assert host.system.products == choice and not answers


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("local_ray")
def test_one_choice_for_the_systems_life(tiny: Tiny) -> None:
    """Prepared for when idle, agreed on with a service that was lost, kept by one lost later."""
    config = SystemConfig(
        str(tiny("llama-gqa", "float16").path), context_length=128, prefill_chunk=64
    )
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    short = GenerateRequest(sampling, prompt_ids=[1, 2, 3])
    long = GenerateRequest(sampling, prompt_ids=[1] * 64)
    with System.start(config) as system:

        def of_services(function: Callable[[Any], Any]) -> list[Any]:
            handles = system._driver.__ray_call__.remote(
                lambda host: host.services.connection.handles
            )
            return [ray.get(each.__ray_call__.remote(function)) for each in ray.get(handles)]

        for _ in range(600):
            if all(of_services(lambda host: host._service._products._made is not None)):
                break
            threading.Event().wait(0.1)
        else:
            raise AssertionError("nothing was prepared")
        system.complete(short)
        assert system.call("describe").products is None  # until a long prompt needs it
        os.kill(system.call("processes")["cpu0"], signal.SIGKILL)
        expected = system.complete(long).ids
        agreed = system.call("describe").products
        assert agreed is not None
        os.kill(system.call("processes")["cpu0"], signal.SIGKILL)
        assert system.complete(long).ids == expected
        assert system.call("describe").products == agreed
        assert of_services(lambda host: host._service._products._choice) == [agreed] * 2
