"""Whole systems on a real Ray: the same tokens, and what happens when a part dies or hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.protocol.messages import GenerateRequest, Generation, LoadProgress, SystemConfig
from actors.system import System
from model.errors import PromptError, ServiceError
from model.sampling import SamplingParams
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

Tiny = Callable[..., TinyCheckpoint]
ROOT = Path(__file__).resolve().parents[2]
NAME = "system-of-tests"
LONG_CONTEXT = 60_000  # some ten seconds of decoding, for what happens meanwhile


def config_of(checkpoint: TinyCheckpoint, **changes: Any) -> SystemConfig:
    config = SystemConfig(
        str(checkpoint.path),
        num_cpu_actors=2,
        num_threads=2,
        context_length=128,
        kv_dtype="float32",
        prefill_chunk=32,
    )
    return replace(config, **changes)


def greedy(checkpoint: TinyCheckpoint, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerateRequest(replace(sampling, **changes), prompt_ids=checkpoint.ids[:10].tolist())


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Whether `condition` came true; time in which this process was stopped does not count."""
    for _ in range(int(limit_s / 0.05)):
        if condition():
            return True
        time.sleep(0.05)
    return False


def all_gone(pids: dict[str, int]) -> bool:
    return wait_until(lambda: not any(is_running(pid) for pid in pids.values()))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_tokenizer(path: Path) -> None:
    """One word a token, so that a stream shows every token as it comes."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A copy with a tokenizer: other modules use the checkpoint without one."""
    path = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(tiny("llama-gqa").path, path)
    write_tokenizer(path)
    return TinyCheckpoint(path)


@pytest.fixture(scope="module")
def running(local_ray: None, llama: TinyCheckpoint) -> Iterator[System]:
    """The system that tests share which leave it as it was."""
    with System.start(config_of(llama), name=NAME) as system:
        yield system


# --- serving ---------------------------------------------------------------------------------


def test_greedy_tokens(running: System, llama: TinyCheckpoint) -> None:
    result = running.complete(greedy(llama))
    assert result.ids == llama.greedy_ids
    assert result.finish_reason == "length"
    assert 0 < result.neurons_computed < 1
    assert running.call("describe").model_path == str(llama.path)


def test_stream_shows_every_token(running: System, llama: TinyCheckpoint) -> None:
    events = list(running.generate(greedy(llama)))
    assert sum(event.num_tokens for event in events) == GREEDY_TOKENS
    assert [event.result is not None for event in events] == [False] * (len(events) - 1) + [True]
    words = "".join(event.text for event in events).split()
    assert words == [f"w{token_id}" for token_id in llama.greedy_ids]


def test_text_prompt_and_stop_string(running: System, llama: TinyCheckpoint) -> None:
    prompt = " ".join(f"w{token_id}" for token_id in llama.ids[:10])
    words = [f"w{token_id}" for token_id in llama.greedy_ids]
    stop = " " + words[20]
    request = replace(greedy(llama, stop=(stop,)), prompt=prompt, prompt_ids=None)
    result = running.complete(request)
    text = "".join(" " + word for word in words)
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"


def test_many_streams_at_once(running: System, llama: TinyCheckpoint) -> None:
    """More than run at once, from many threads: each stream shows its own tokens and no other's."""
    prompts = [llama.ids[n : n + size].tolist() for n, size in enumerate([10, 1, 20, 32] * 5)]
    requests = [GenerateRequest(greedy(llama).sampling, prompt_ids=ids) for ids in prompts]
    alone = [running.complete(request).ids for request in requests]
    assert alone[0] == llama.greedy_ids and len(set(map(tuple, alone))) > 10
    shown: list[list[str]] = [[] for _ in requests]

    def ask(number: int) -> None:
        for event in running.generate(requests[number]):
            shown[number] += event.text.split()

    askers = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(requests))]
    for asker in askers:
        asker.start()
    assert running.call("describe").max_batch == 8  # control calls come through
    for asker in askers:
        asker.join(200)
    assert shown == [[f"w{token_id}" for token_id in ids] for ids in alone]


@pytest.mark.parametrize(
    ("prompt_ids", "says"),
    [
        ([], "empty"),
        ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE}"),
        ([-1], "token id -1"),
        ([1] * 128, "128 tokens"),
        ([1] * 1000, "1000 tokens"),
    ],
)
def test_bad_prompts(
    running: System, llama: TinyCheckpoint, prompt_ids: list[int], says: str
) -> None:
    request = replace(greedy(llama), prompt_ids=prompt_ids)
    with pytest.raises(PromptError, match=says):
        running.complete(request)
    assert running.complete(greedy(llama)).ids == llama.greedy_ids


def test_generation_ends_with_the_context(running: System, llama: TinyCheckpoint) -> None:
    whole = running.complete(greedy(llama, max_tokens=1000))
    assert whole.finish_reason == "length"
    assert len(whole.ids) == 128 - 10
    assert whole.ids[:GREEDY_TOKENS] == llama.greedy_ids
    almost = replace(greedy(llama, max_tokens=1000), prompt_ids=[1] * 127)
    assert len(running.complete(almost).ids) == 1


def test_idle_services_use_no_processor(running: System, llama: TinyCheckpoint) -> None:
    running.complete(greedy(llama))

    def used_while_idle() -> float:
        before = running.call("cpu_seconds")
        time.sleep(2)
        after = running.call("cpu_seconds")
        assert set(after) == {"gpu", "cpu0", "cpu1"}
        return max(after[name] - before[name] for name in after)

    # Once idle they prepare for long prompts, for seconds; then for nothing.
    assert any(used_while_idle() < 0.1 for _ in range(6))


def test_exchange_can_be_measured(running: System) -> None:
    times_ns = running.call("measure_exchange", 200)
    assert times_ns.shape == (200,) and (times_ns > 0).all()


def test_another_process_attaches_by_name(running: System, llama: TinyCheckpoint) -> None:
    prompt = ",".join(map(str, llama.ids[:10]))
    address = ray.get_runtime_context().gcs_address
    found = run_script("attach", NAME, prompt, address)
    assert found == {"ids": llama.greedy_ids, "missing": None}
    assert running.complete(greedy(llama)).ids == llama.greedy_ids


def run_script(*arguments: str) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.actors.ray_script", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("variant", "exchange", "mode"),
    [
        ("opt-postnorm", "arena", "exact"),
        ("falcon-bias", "arena", "dense"),
        ("llama-gqa", "calls", "exact"),
    ],
)
def test_greedy_tokens_of_other_systems(tiny: Tiny, variant: str, exchange: str, mode: str) -> None:
    checkpoint = tiny(variant)
    progress: list[LoadProgress] = []
    config = config_of(checkpoint, exchange=exchange, mode=mode)
    with System.start(config, on_progress=progress.append) as system:
        assert system.complete(greedy(checkpoint)).ids == checkpoint.greedy_ids
        long = checkpoint.ids.tolist() * 2  # by matrix products, in chunks
        found = system.complete(replace(greedy(checkpoint, max_tokens=1), prompt_ids=long))
        assert found.ids == [checkpoint.most_likely_after(long)]
        pids = system.call("processes")
    assert progress[-1].stage == "ready"
    assert progress[-1].loaded_bytes == progress[-1].total_bytes > 0
    compiling = [report for report in progress if "kernels" in report.stage]
    assert all(report.loaded_bytes == report.total_bytes for report in compiling)
    assert set(pids) == {"driver", "gpu", "cpu0", "cpu1"} and all_gone(pids)


# --- failures --------------------------------------------------------------------------------


@contextmanager
def long_run(llama: TinyCheckpoint, exchange: str) -> Iterator[tuple[System, dict[str, int], Any]]:
    """A system that generates, its processes, and a function that awaits the request's end."""
    config = config_of(llama, context_length=LONG_CONTEXT, exchange=exchange)
    with System.start(config) as system:
        pids, came = system.call("processes"), threading.Event()
        outcome: list[Any] = []

        def generate() -> None:
            try:
                request = replace(greedy(llama, max_tokens=LONG_CONTEXT), request_id="long")
                for event in system.generate(request):
                    came.set()
                    outcome[:] = [event.result]
            except BaseException as error:
                outcome[:] = [error]

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        assert came.wait(150)

        def ended() -> Generation | BaseException:
            thread.join(150)
            assert not thread.is_alive()
            return outcome[0]

        yield system, pids, ended
    assert all_gone(pids)


def test_a_stuck_driver_is_named(llama: TinyCheckpoint) -> None:
    with long_run(llama, "arena") as (system, pids, ended):
        os.kill(pids["driver"], signal.SIGSTOP)
        started = time.monotonic()
        error = ended()
        assert isinstance(error, ServiceError), error
        assert "the driver does not answer" in str(error)
        assert time.monotonic() - started < 15
        with pytest.raises(ServiceError, match="the driver does not answer"):
            system.complete(greedy(llama))


def test_waiting_streams_do_not_lock_out_control(llama: TinyCheckpoint) -> None:
    with long_run(llama, "arena") as (system, _, ended):
        for _ in range(70):
            system._driver.generate.options(num_returns="streaming").remote(greedy(llama))
        assert system.call("describe").context_length == LONG_CONTEXT
        system.cancel("long")
        assert ended().finish_reason == "cancelled"


def test_cancelled_requests_and_a_lost_driver(llama: TinyCheckpoint) -> None:
    with long_run(llama, "arena") as (system, pids, ended):
        system.call("cancel", "long")
        result = ended()
        assert isinstance(result, Generation)
        assert result.finish_reason == "cancelled"
        assert 0 < len(result.ids) < LONG_CONTEXT - 10
        stream = system.generate(greedy(llama, max_tokens=LONG_CONTEXT))
        assert next(stream).text
        stream.close()  # type: ignore[attr-defined]  # cancels it, so that the next need not wait for its end
        assert system.complete(greedy(llama)).ids == llama.greedy_ids
        stream = system.generate(greedy(llama, max_tokens=LONG_CONTEXT))
        next(stream)
        os.kill(pids["driver"], signal.SIGKILL)
        with pytest.raises(ServiceError, match="the driver died") as caught:
            list(stream)
        assert "\n" not in str(caught.value)
        with pytest.raises(ServiceError, match="driver"):
            system.complete(greedy(llama))


# --- a Ray of its own ------------------------------------------------------------------------


def test_nothing_stays_behind(llama: TinyCheckpoint) -> None:
    """Start Ray and a system in a process, stop both: no process, no file in shared memory."""
    before = set(os.listdir("/dev/shm"))
    found = run_script("own", str(llama.path), ",".join(map(str, llama.ids[:10])))
    assert found["ids"] == llama.greedy_ids
    assert not found["ray"]  # it was started for the system, so it ended with it
    assert set(found["processes"]) == {"driver", "gpu", "cpu0", "cpu1"}
    assert all_gone(found["processes"])
    assert found["mapped"], "the arena is in shared memory"
    assert all(name.startswith("plasma") for name in found["mapped"])
    assert wait_until(lambda: not ours(set(os.listdir("/dev/shm")) - before, found), 10)


def ours(new_files: set[str], found: dict[str, Any]) -> set[str]:
    """Files that the script left; another Ray or a browser may come and go meanwhile."""
    others = ("plasma", ".org.chromium.", ".com.google.")
    mapped = {name.removesuffix(" (deleted)") for name in found["mapped"]}
    return (new_files & mapped) | {name for name in new_files if not name.startswith(others)}
