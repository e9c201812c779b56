"""Pages of a KV cache in files: which folder, how large, by whom, and what the driver knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.kv_cache import prefix_file
from hotcold.actors.kv_cache.page_store import PageStore
from hotcold.actors.kv_cache.pool import Page
from hotcold.actors.kv_cache.prefix_file import FOLDER, PrefixFile
from hotcold.actors.protocol.failures import CacheLost, ServiceLost
from tests.actors.kept_system import wait_until

LAYERS, PAGES, LIMIT = 3, 16, 1 << 20
ONE, OTHER = b"one arithmetic", b"another arithmetic"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of a model; the user's cache is elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model"
    path.mkdir()
    return path


def cache(seed: int | None = None, layers: int = LAYERS) -> list[np.ndarray]:
    """Keys and values of unequal formats, as quantized ones may be; zeros without a seed."""
    shapes = ((layers, PAGES, 2, 64, 8), np.uint16), ((layers, PAGES, 2, 64, 9), np.uint8)
    if seed is None:
        return [np.zeros(shape, dtype) for shape, dtype in shapes]
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, shape).astype(dtype) for shape, dtype in shapes]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Services:
    """The calls of a system's services with attention, without processes."""

    def __init__(self, *kept: PrefixFile) -> None:
        self.kept = list(kept)
        self.fails = False
        self.renewed: list[int] = []
        self.before_saving: Callable[[], Any] = lambda: None

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        if self.fails:
            raise ServiceLost(0, "the gpu service died; start again")
        if method == "save_pages":
            self.before_saving()
        name = method.removesuffix("_pages")
        return [getattr(one, name)(*arguments) for one in self.kept]

    def renew(self, causes: Mapping[int, str]) -> None:
        self.renewed += causes
        raise CacheLost(causes[0])


def at(*pages: int) -> list[Page]:
    """Pages of a cache whose layers have no windows."""
    return [(page,) for page in pages]


def save_all(store: PageStore, pages: dict[int, int]) -> None:
    """Save pages by the numbers of their keys, and wait until that has ended."""
    for number, page in pages.items():
        store.save(key(number), (page,))
    ended: list[bytes] = []

    def has_ended() -> bool:
        ended.extend(store.saved())
        return len(ended) >= len(pages)

    assert wait_until(has_ended)
    assert sorted(ended) == sorted(map(key, pages))


@pytest.fixture
def stores() -> Iterator[Callable[..., PageStore]]:
    """Makes stores, and closes them in the end."""
    made: list[tuple[PageStore, Services]] = []

    def make(services: Services) -> PageStore:
        made.append((PageStore(services, services.renew), services))
        return made[-1][0]

    yield make
    for store, services in made:
        store.close()
        for kept in services.kept:
            kept.close()


class Pause:
    """Holds its caller until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


Make = Callable[..., PageStore]


def kept_pages(model: Path, arrays: list[np.ndarray], limit: int = LIMIT) -> PrefixFile:
    return PrefixFile(model, [(0, layer) for array in arrays for layer in array], limit, "")


def test_the_limit_takes_other_arithmetics_first(model: Path, stores: Make) -> None:
    arrays = cache(5)
    page = sum(array.nbytes for array in arrays) // PAGES
    limit = 3 * 8192 + 6 * page
    services = Services(kept_pages(model, arrays, limit))
    store, folder = stores(services), model / "hotcold" / FOLDER
    store.reopen(OTHER)
    save_all(store, {n: n for n in range(4)})
    store.reopen(ONE)
    assert len(list(folder.glob("*"))) == 2
    save_all(store, {n: n for n in range(4)})
    assert len(list(folder.glob("*"))) == 1
    for n in range(4, 12):
        save_all(store, {n: n})
        assert sum(path.stat().st_size for path in folder.glob("*")) <= limit
    there = store.keys()
    assert key(11) in there and key(0) not in there and 4 <= len(there) <= 6
    assert there == {key(n) for n in range(12 - len(there), 12)}
    assert store.load([key(10), key(11)], at(0, 1)) == 2


def test_a_full_disk_is_said_once(
    model: Path, stores: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    store = stores(Services(kept_pages(model, cache(8))))
    store.reopen(ONE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for n in range(3):
        save_all(store, {n: n})
    assert store.keys() == set()
    assert [record.message for record in caplog.records] == [store.note]
    assert store.note.endswith("No space left on device; no page is added")
    monkeypatch.undo()
    save_all(store, {4: 4})
    assert store.keys() == {key(4)}


def test_a_call_that_is_given_up_while_it_goes_on(
    model: Path, stores: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was only stopped writes later: what its page holds by then is not found."""
    monkeypatch.setattr("hotcold.actors.kv_cache.page_store._RETRY_S", 0.0)
    arrays = cache(16)
    services, goes_on = Services(kept_pages(model, arrays)), threading.Event()
    late: list[threading.Thread] = []

    def stop() -> None:
        services.before_saving = lambda: None

        def write() -> None:
            assert goes_on.wait(60)
            services.kept[0].save(session, [], [key(1)], at(1))

        session = store._session
        late.append(threading.Thread(target=write))
        late[0].start()
        services.fails = True
        raise ServiceLost(0, "the gpu service is stopped")

    services.before_saving = stop
    store = stores(services)
    store.reopen(ONE)
    store.save(key(1), (1,))
    assert wait_until(lambda: services.fails)
    for _ in range(3):
        assert store.saved() == []  # its page is kept from use
    services.fails = False
    assert wait_until(lambda: store.saved() == [key(1)])
    for array in arrays:
        array[:, 1] = 99  # another prompt's
    goes_on.set()
    late[0].join(60)
    save_all(store, {2: 2})
    store.reopen(ONE)
    assert store.keys() == {key(2)}


@pytest.mark.parametrize("call", ["preadv", "pwritev", "ftruncate"])
def test_a_disk_that_hangs_turns_the_file_off(
    model: Path,
    stores: Make,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is asked is answered, once after a while; nothing that hung changes a page later."""
    arrays = cache(22)
    services = Services(kept_pages(model, arrays))
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {1: 1})
    for name in ("_LONGEST_LOAD_S", "_LONGEST_OPEN_S", "_LONGEST_SAVE_S"):
        monkeypatch.setattr(prefix_file, name, 0.3)
    pause, do = Pause(), getattr(os, call)

    def hang(*arguments: Any) -> Any:
        pause()
        return do(*arguments)

    monkeypatch.setattr(os, call, hang)
    if call == "preadv":
        before = [array.copy() for array in arrays]
        assert store.load([key(1)], at(7)) == 0
    elif call == "ftruncate":
        store.reopen(ONE, anew=True)
    else:
        save_all(store, {2: 2})
    assert pause.begun.wait(60)
    for _ in range(2):
        assert store.load([key(1)], at(8)) == 0
        save_all(store, {3: 3})
        store.reopen(ONE)
    assert "does not answer, so no prefix is kept on disk any more" in store.note
    assert [record.message for record in caplog.records] == [store.note]
    services.kept[0].close()
    if call != "preadv":
        for array in arrays:
            array[:, 2] = 99  # another prompt's
    pause.may_end.set()
    monkeypatch.setattr(os, call, do)
    if call == "preadv":
        assert wait_until(lambda: not services.kept[0]._num_loading)
        assert all((one == other).all() for one, other in zip(arrays, before, strict=True))
    assert wait_until(lambda: services.kept[0]._on_disk.acquire(blocking=False))
    services.kept[0]._close_file()
    later = kept_pages(model, cache())
    assert later.open(b"later", ONE).keys <= {key(1), key(2)}
    if later.load(b"later", [key(2)], at(2)):  # what was saved before the disk hung
        assert not all((array[2] == 99).all() for _, array in later._kinds[0])
    later.close()


@pytest.mark.parametrize("what", ["a file", "a link", "of others", "within one of others"])
def test_a_folder_that_is_not_ones_own_is_not_used(
    model: Path, tmp_path: Path, stores: Make, what: str
) -> None:
    """Who gives a model away may have put anything beside it."""
    others, folder = tmp_path / "documents", model / "hotcold" / FOLDER
    others.mkdir(mode=0o700)
    (others / f"{'0' * 32}.pages").write_bytes(bytes(100_000))
    if what == "a file":
        (model / "hotcold").write_text("not a folder")
    else:
        (model / "hotcold").mkdir(mode=0o755)
        folder.symlink_to(others) if what == "a link" else folder.mkdir(mode=0o700)
    if "others" in what:
        (folder if what == "of others" else folder.parent).chmod(0o777)
    store = stores(Services(kept_pages(model, cache(21), 50_000)))
    store.reopen(ONE)
    save_all(store, {1: 1})
    assert store.keys() == {key(1)} and str(tmp_path / "cache" / "hotcold" / FOLDER) in store.note
    assert len(list(others.iterdir())) == 1
    assert "others" not in what or not list(folder.iterdir())


def test_only_files_of_pages_are_counted_and_removed(
    model: Path, tmp_path: Path, stores: Make
) -> None:
    folder = model / "hotcold" / FOLDER
    (model / "hotcold").mkdir(mode=0o755)
    folder.mkdir(mode=0o700)
    (folder / "thesis.pages").write_bytes(bytes(100_000))
    (tmp_path / "target").write_bytes(bytes(100_000))
    (folder / f"{'1' * 32}.pages").symlink_to(tmp_path / "target")
    old = folder / f"{'2' * 32}-0-2.pages"
    old.write_bytes(bytes(100_000))
    old.chmod(0o600)
    store = stores(Services(kept_pages(model, cache(23), 60_000)))
    store.reopen(ONE)
    save_all(store, {1: 1})
    assert store.keys() == {key(1)} and not old.exists()
    assert (folder / "thesis.pages").exists() and (tmp_path / "target").stat().st_size == 100_000
