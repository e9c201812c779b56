"""Pages of a KV cache in files: which folder, how large, by whom, and what the driver knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.kept_pages import FOLDER, KeptPages
from hotcold.actors.driver.service_page_store import ServicePageStore
from hotcold.actors.protocol.page_store import OpenedPages, Page
from hotcold.model.errors import ServiceError
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

    def __init__(self, *kept: KeptPages) -> None:
        self.kept = list(kept)
        self.fails = False
        self.before_saving: Callable[[], Any] = lambda: None

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        if self.fails:
            raise ServiceError("the gpu service died; start again")
        if method == "save_pages":
            self.before_saving()
        name = method.removesuffix("_pages")
        return [getattr(one, name)(*arguments) for one in self.kept]


def at(*pages: int) -> list[Page]:
    """Pages of a cache whose layers have no windows."""
    return [(page,) for page in pages]


def save_all(store: ServicePageStore, pages: dict[int, int]) -> None:
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
def stores() -> Iterator[Callable[..., ServicePageStore]]:
    """Makes stores, and closes them in the end."""
    made: list[tuple[ServicePageStore, Services]] = []

    def make(services: Services) -> ServicePageStore:
        made.append((ServicePageStore(services), services))
        return made[-1][0]

    yield make
    for store, services in made:
        store.close()
        for kept in services.kept:
            kept.close()


Make = Callable[..., ServicePageStore]


def kept_pages(model: Path, arrays: list[np.ndarray], limit: int = LIMIT) -> KeptPages:
    return KeptPages(model, arrays, limit, "")


def test_pages_of_an_earlier_process_are_loaded(model: Path, stores: Make) -> None:
    arrays = cache(1)
    services = Services(kept_pages(model, arrays))
    store = stores(services)
    store.reopen(ONE)
    assert store.note.startswith("prefix cache: 0 pages")
    save_all(store, {n: n for n in range(5)})
    assert store.keys() == {key(n) for n in range(5)}
    store.close()
    services.kept[0].close()

    new = cache()
    services.kept[0] = kept_pages(model, new)
    later = stores(services)
    later.reopen(ONE)
    assert later.keys() == {key(n) for n in range(5)}
    assert "5 pages" in later.note and str(model / "hotcold" / FOLDER) in later.note
    assert later.load([key(3), key(0), key(4)], at(7, 8, 9)) == 3
    for array, saved in zip(new, arrays, strict=True):
        assert (array[:, 7:10] == saved[:, [3, 0, 4]]).all()
        assert not array[:, :7].any() and not array[:, 10:].any()


def test_what_is_damaged_ends_the_pages_that_are_good(model: Path, stores: Make) -> None:
    services = Services(kept_pages(model, cache(2)))
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {n: n for n in range(4)})
    (path,) = (model / "hotcold" / FOLDER).glob("*")
    slot = (path.stat().st_size - 8192) // 4
    with path.open("r+b") as file:
        file.seek(8192 + 2 * slot + 10)
        before = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([before[0] ^ 1]))
    assert store.load([key(n) for n in range(4)], at(9, 10, 11, 12)) == 2
    assert store.keys() == {key(0), key(1)}


def test_another_arithmetic_has_another_file(model: Path, stores: Make) -> None:
    services = Services(kept_pages(model, cache(3)))
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {1: 1})
    store.reopen(OTHER)
    assert store.keys() == set() and store.load([key(1)], at(2)) == 0
    save_all(store, {2: 2})
    store.reopen(ONE)
    assert store.keys() == {key(1)} and store.load([key(1)], at(2)) == 1
    assert len(list((model / "hotcold" / FOLDER).glob("*"))) == 2


def test_two_systems_of_one_arithmetic(model: Path, stores: Make) -> None:
    first = stores(Services(kept_pages(model, cache(4))))
    second = stores(Services(kept_pages(model, cache(4))))
    first.reopen(ONE)
    save_all(first, {1: 1})
    second.reopen(ONE)
    assert "another running system uses it" in second.note and "\n" not in second.note
    assert second.keys() == set() and second.load([key(1)], at(2)) == 0
    save_all(second, {3: 3})  # ends, and nothing is written
    assert second.keys() == set() and first.keys() == {key(1)}


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


def test_another_systems_file_is_not_removed(model: Path, stores: Make) -> None:
    arrays = cache(6)
    page = sum(array.nbytes for array in arrays) // PAGES
    other = stores(Services(kept_pages(model, arrays)))
    other.reopen(OTHER)
    save_all(other, {n: n for n in range(4)})
    store = stores(Services(kept_pages(model, arrays, 4 * page)))
    store.reopen(ONE)
    assert "give a larger --prefix-cache" in store.note
    save_all(store, {1: 1})
    assert store.keys() == set()
    assert other.load([key(n) for n in range(4)], at(8, 9, 10, 11)) == 4


def test_a_model_whose_folder_cannot_be_written(model: Path, stores: Make) -> None:
    (model / "hotcold").write_text("not a folder")
    store = stores(Services(kept_pages(model, cache(7))))
    store.reopen(ONE)
    save_all(store, {1: 1})
    assert str(model.parent / "cache" / "hotcold" / FOLDER) in store.note
    assert store.keys() == {key(1)}


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


def test_a_new_process_answers_no_call_of_an_earlier_session(model: Path, stores: Make) -> None:
    services = Services(kept_pages(model, cache(9)))
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {1: 1})
    services.kept[0].close()
    services.kept[0] = kept_pages(model, cache())  # its KV cache is empty
    save_all(store, {2: 2})
    assert store.load([key(1)], at(1)) == 0
    store.reopen(ONE)
    assert store.keys() == {key(1)}  # nothing of the empty KV cache was saved as page 2
    assert store.load([key(1)], at(1)) == 1


def test_a_lost_service_is_no_error(model: Path, stores: Make) -> None:
    services = Services(kept_pages(model, cache(10)))
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {1: 1})
    services.fails = True
    save_all(store, {2: 2})
    assert store.load([key(1)], at(1)) == 0
    store.reopen(ONE)
    assert store.keys() == set()
    services.fails = False
    store.reopen(ONE)
    assert store.keys() == {key(1)}


def test_reopening_waits_for_what_is_being_read(model: Path, stores: Make) -> None:
    """A page may be used anew once `reopen` has returned; what waited is never written."""
    begun, may_end = threading.Event(), threading.Event()
    services = Services(kept_pages(model, cache(11)))

    def wait() -> None:
        begun.set()
        assert may_end.wait(60)

    services.before_saving = wait
    store = stores(services)
    store.reopen(ONE)
    store.save(key(1), (1,))
    assert begun.wait(60)
    store.save(key(2), (2,))
    reopened = threading.Thread(target=store.reopen, args=(ONE,))
    reopened.start()
    reopened.join(0.2)
    assert reopened.is_alive()
    may_end.set()
    reopened.join(60)
    assert not reopened.is_alive()
    assert store.saved() == [] and store.keys() == {key(1)}


def test_a_page_is_there_where_all_services_have_it(model: Path, stores: Make) -> None:
    """Two services share the layers, each with a file of its own; one lacks a page."""
    arrays = [cache(13, 2), cache(14, 1)]
    parts = [
        KeptPages(model, own, LIMIT, part)
        for own, part in zip(arrays, ("-0-2", "-2-3"), strict=True)
    ]
    services = Services(*parts)
    store = stores(services)
    store.reopen(ONE)
    save_all(store, {n: n for n in range(3)})
    assert store.load([key(0), key(1), key(2)], at(5, 6, 7)) == 3
    assert all((one[:, 5:8] == one[:, 0:3]).all() for own in arrays for one in own)
    assert len(list((model / "hotcold" / FOLDER).glob("*"))) == 2
    (second,) = (model / "hotcold" / FOLDER).glob("*-2-3.pages")
    parts[1].close()
    content = bytearray(second.read_bytes())
    content[4096 + 64] ^= 1  # its second entry
    second.write_bytes(content)
    services.kept[1] = KeptPages(model, arrays[1], LIMIT, "-2-3")
    store.reopen(ONE)
    assert store.keys() == {key(0), key(2)}
    assert "are damaged" in store.note


def test_layers_with_a_window_have_pages_of_their_own(model: Path, stores: Make) -> None:
    arrays = cache(16, 3)
    windowed = [False, True, False]
    services = Services(KeptPages(model, arrays, LIMIT, "", windowed=windowed))
    store = stores(services)
    store.reopen(ONE)
    store.save(key(1), (4, 2))
    assert wait_until(lambda: store.saved() == [key(1)])
    before = [array.copy() for array in arrays]
    assert store.load([key(1)], [(7, 8)]) == 1
    for array, old in zip(arrays, before, strict=True):
        for layer, has in enumerate(windowed):
            old[layer, 8 if has else 7] = old[layer, 2 if has else 4]
        assert (array == old).all()


def test_a_service_that_is_loaded_again_opens_its_file(model: Path) -> None:
    kept = kept_pages(model, cache(15))
    opened = kept.open(b"session", ONE)
    assert opened == OpenedPages(opened.path, set(), 4096, "") and opened.path
    assert kept.save(b"session", [], [key(1)], at(1)) is not None
    assert kept.open(b"later", ONE).keys == {key(1)}
    assert kept.save(b"session", [], [key(2)], at(2)) is None
    assert kept.load(b"session", [key(1)], at(1)) == 0
    assert kept.load(b"later", [key(1)], at(1)) == 1
    kept.close()
