"""Beginnings of prompts in a file: answers are those of a system that computes all anew, always."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hotcold.actors.attention.prefix_file import FOLDER
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from tests.actors.changing_services import config_of, driver_of
from tests.actors.kept_system import wait_until
from tests.actors.stand_in_ray import (
    StandInActor,
    StandInRay,
    StandInSystem,
    lose_once,
    stand_in_system,
)
from tests.conftest import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("one_torch_thread")]
SIZE = 10 << 20
PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 200).tolist()


class Answer(NamedTuple):
    ids: list[int]
    logprobs: list[Any]


def asked(ids: list[int]) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, temperature=1.2, seed=3, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids, num_logprobs=3)


def answer(system: StandInSystem, ids: list[int]) -> tuple[Answer, int]:
    """The answer, and how many of the prompt's tokens were not computed."""
    logprobs: list[Any] = []
    for event in driver_of(system).generate(asked(ids)):
        logprobs += event.logprobs
    assert event.result is not None
    return Answer(event.result.ids, logprobs), event.result.num_cached_tokens


def with_file(checkpoint: TinyCheckpoint, **options: Any) -> SystemConfig:
    return config_of(checkpoint.path, **{"prefix_cache_bytes": SIZE} | options)


def cold(host: StandInRay, checkpoint: TinyCheckpoint, *prompts: list[int]) -> list[Answer]:
    """The answers of a system that keeps nothing."""
    with stand_in_system(host, with_file(checkpoint, prefix_cache_bytes=0)) as system:
        found = [answer(system, ids) for ids in prompts]
    assert [num_cached for _, num_cached in found] == [0] * len(prompts)
    return [one for one, _ in found]


def note(system: StandInSystem) -> str:
    """What is said of the file at the start."""
    (line,) = (one for one in system.actor.services.notes if FOLDER in one)
    assert "\n" not in line
    return line


def files(checkpoint: TinyCheckpoint) -> list[Path]:
    return sorted((checkpoint.path / "hotcold" / FOLDER).glob("*"))


def num_pages_on_file(system: StandInSystem) -> int:
    store = system.actor.services._store
    assert store is not None
    return len(store.keys())


def test_a_later_start_computes_only_what_is_new(copied: TinyCheckpoint, host: StandInRay) -> None:
    edited = [*PROMPT[:100], *PROMPT[50:]]
    expected = cold(host, copied, PROMPT, edited)
    with stand_in_system(host, with_file(copied)) as system:
        assert note(system).startswith("prefix cache: 0 pages")
        assert answer(system, PROMPT) == (expected[0], 0)
        assert answer(system, PROMPT) == (expected[0], 192)
    with stand_in_system(host, with_file(copied)) as system:
        assert note(system).startswith("prefix cache: 3 pages")
        assert answer(system, PROMPT) == (expected[0], 192)
        assert answer(system, edited) == (expected[1], 64)
    with stand_in_system(host, with_file(copied)) as system:
        assert answer(system, edited) == (expected[1], 192)


def test_a_lost_service_finds_its_pages_again(copied: TinyCheckpoint, host: StandInRay) -> None:
    others = [PROMPT[::-1], [*PROMPT[:130], *PROMPT[:50]]]
    expected = cold(host, copied, PROMPT, *others)
    with stand_in_system(host, with_file(copied)) as system:
        assert answer(system, PROMPT) == (expected[0], 0)
        assert wait_until(lambda: num_pages_on_file(system) == 3)
        for service in (0, 1):  # with the KV cache; without
            lose_once(host, service)
            assert answer(system, others[0])[0] == expected[1]
        assert answer(system, others[1]) == (expected[2], 128)  # of the file: memory is lost
        system.service("gpu").kill()
        assert answer(system, others[1])[0] == expected[2]
        assert answer(system, PROMPT) == (expected[0], 192)


def dies_before(actor: StandInActor, method: str) -> None:
    """Let a service's process die when it is called so, once."""

    def die() -> None:
        actor.before.clear()
        actor.kill()

    actor.before[method] = die


def test_a_service_that_is_lost_while_it_loads_or_saves(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    expected = cold(host, copied, PROMPT, PROMPT[1:])
    with stand_in_system(host, with_file(copied)) as system:
        dies_before(system.service("gpu"), "save_pages")
        assert answer(system, PROMPT)[0] == expected[0]
        assert answer(system, PROMPT[1:])[0] == expected[1]
        assert answer(system, PROMPT)[0] == expected[0]
    with stand_in_system(host, with_file(copied)) as system:
        dies_before(system.service("gpu"), "load_pages")
        assert answer(system, PROMPT)[0] == expected[0]
        assert answer(system, PROMPT[1:])[0] == expected[1]


@pytest.mark.parametrize("what", ["flipped", "cut", "of another model", "empty"])
def test_a_damaged_file_changes_no_answer(
    copied: TinyCheckpoint, host: StandInRay, what: str
) -> None:
    expected = cold(host, copied, PROMPT)[0]
    with stand_in_system(host, with_file(copied)) as system:
        assert answer(system, PROMPT) == (expected, 0)
    (path,) = files(copied)
    content = bytearray(path.read_bytes())
    slot = (len(content) - 8192) // 3
    if what == "flipped":
        content[8192 + slot + 5] ^= 4  # of the second page
    elif what == "cut":
        del content[8192 + 2 * slot - 5 :]
    else:
        content[:] = b"" if what == "empty" else content[64:128] * (len(content) // 64)
    path.write_bytes(content)
    with stand_in_system(host, with_file(copied)) as system:
        found, num_cached = answer(system, PROMPT)
        assert found == expected
        # Which page is the damaged one depends on how many were written by one call.
        assert num_cached in ((0, 64, 128) if what in ("flipped", "cut") else (0,))
        lines = {
            "flipped": "3 pages",
            "cut": "its end is missing",
            "of another model": "begun anew",
            "empty": "0 pages",
        }
        assert lines[what] in note(system)
    with stand_in_system(host, with_file(copied)) as system:
        assert note(system).startswith("prefix cache: 3 pages")
        assert answer(system, PROMPT) == (expected, 192)


def test_two_systems_at_once(copied: TinyCheckpoint, host: StandInRay) -> None:
    expected = cold(host, copied, PROMPT)[0]
    with stand_in_system(host, with_file(copied)) as first:
        assert answer(first, PROMPT) == (expected, 0)
        assert wait_until(lambda: num_pages_on_file(first) == 3)
        with stand_in_system(host, with_file(copied)) as second:
            assert "another running system uses it" in note(second)
            assert answer(second, PROMPT) == (expected, 0)
            assert answer(second, PROMPT) == (expected, 192)  # of its own memory


def test_memory_for_one_prompt_alone(copied: TinyCheckpoint, host: StandInRay) -> None:
    """Pages given up in memory come back from the file, and in turns that is all there is."""
    prompts = [PROMPT[n:] + PROMPT[:n] for n in range(0, 200, 40)]
    expected = cold(host, copied, *prompts)
    options = {"kv_positions": 256, "max_batch": 1}
    with stand_in_system(host, with_file(copied, **options)) as system:
        assert [answer(system, ids) for ids in prompts] == [(one, 0) for one in expected]
        assert wait_until(lambda: num_pages_on_file(system) == 15)
        for _ in range(2):
            assert [answer(system, ids) for ids in prompts] == [(one, 192) for one in expected]
        path, size = files(copied)[0], 15
        assert path.stat().st_size == 8192 + size * ((path.stat().st_size - 8192) // size)


@pytest.mark.usefixtures("local_ray")
def test_a_system_of_processes(copied: TinyCheckpoint) -> None:
    """The last pages are written while it is stopped."""
    config = with_file(copied, num_threads=1)
    short = replace(asked(PROMPT), sampling=SamplingParams(max_tokens=1, temperature=0.0))
    with System.start(config) as system:
        first = system.complete(short)
    with System.start(config) as system:
        found = system.complete(short)
    assert (first.num_cached_tokens, found.num_cached_tokens) == (0, 192)
    assert found.ids == first.ids


@pytest.mark.thorough
@pytest.mark.usefixtures("local_ray")
def test_processes_that_are_killed(copied: TinyCheckpoint) -> None:
    config = with_file(copied, num_threads=1)
    with System.start(config) as system:
        expected = system.complete(asked(PROMPT))
        system.complete(replace(asked(PROMPT[:30]), sampling=SamplingParams(max_tokens=200)))
        os.kill(system.call("processes")["gpu"], signal.SIGKILL)
        assert system.complete(asked(PROMPT)).ids == expected.ids
        assert system.complete(asked(PROMPT[:150])).num_cached_tokens == 128
        for process_id in system.call("processes").values():  # with the driver
            os.kill(process_id, signal.SIGKILL)
    with System.start(config) as system:
        found = system.complete(asked(PROMPT))
        assert (found.ids, found.num_cached_tokens) == (expected.ids, 192)


def test_options(copied: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config, known = read_config(copied.path), SystemOptions(device="cpu")

    def chosen(given: Any) -> int | None:
        options = SystemOptions.of_keywords({**_defaults(), "prefix_cache": given})
        return choose_system(copied.path, config, replace(options, device="cpu")).prefix_cache_bytes

    assert choose_system(copied.path, config, known).prefix_cache_bytes is None
    assert [chosen(given) for given in ("off", "2GiB", 0, 4096)] == [0, 2 << 30, 0, 4096]
    with pytest.raises(UsageError, match="give a size like 20GiB, or off"):
        chosen(-1)
    with pytest.raises(UsageError, match="prefix_cache: 'on' is no size"):
        chosen("on")
    monkeypatch.setattr("hotcold.actors.setup.choose.choose_device", lambda *_: "cuda")
    with pytest.raises(UsageError, match="give --device cpu"):
        chosen("1GiB")
    assert chosen("off") == 0
    monkeypatch.undo()
    on_hosts = replace(known, hosts=("10.0.0.1", "10.0.0.2"), prefix_cache_bytes=4096)
    with pytest.raises(UsageError, match="is for one computer"):
        choose_system(copied.path, config, on_hosts)
    on_hosts = replace(on_hosts, prefix_cache_bytes=None)
    assert choose_system(copied.path, config, on_hosts).prefix_cache_bytes is None


def _defaults() -> dict[str, Any]:
    from hotcold.actors.protocol.options import OPTIONS

    return {one.keyword: None for one in OPTIONS.values()}
