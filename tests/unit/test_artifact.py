"""Files that belong to one model: whole or not there, refused in one line if they do not fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from hotcold.model.errors import ArtifactError, CheckpointError
from hotcold.model.files import weights_digest
from hotcold.model.files.artifact import (
    COMMANDS,
    VERSION,
    ModelIdentity,
    check_artifact,
    read_artifact,
    write_artifact,
)
from hotcold.model.files.safetensors_file import SafetensorsFile
from tests.full_disk import files_of_at_most
from tests.tiny_models import make_tiny

IDENTITY = ModelIdentity("mine", "ab" * 32)
TENSORS: dict[str, np.ndarray] = {
    "a": np.arange(12, dtype=np.uint16).reshape(3, 4),
    "b": np.linspace(0, 1, 5, dtype=np.float32),
    "c": np.array([[1 << 63]], np.uint64),
    "empty": np.empty((0, 3), np.int8),
}
FACTS: dict[str, Any] = {"list": [1, None, "x"], "text": "ä\n", "share": 0.25, "none": None}


def write(path: Path, kind: str = "profile") -> Path:
    write_artifact(path, kind, IDENTITY, TENSORS, FACTS)
    return path


def refused(path: Path, kind: str = "profile", identity: ModelIdentity = IDENTITY) -> str:
    """The line with which both readers refuse a file; it names the file and the command."""
    lines = []
    for reader in (read_artifact, check_artifact):
        with pytest.raises(ArtifactError) as caught:
            reader(path, kind, identity)
        lines.append(str(caught.value))
    assert lines[0] == lines[1] and len(lines[0].splitlines()) == 1
    assert str(path) in lines[0] and f"`{COMMANDS[kind]}`" in lines[0]
    return lines[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "file.safetensors")


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.safetensors"
    strided = np.arange(12, dtype=np.int16).reshape(3, 4).T
    write_artifact(path, "plan", IDENTITY, TENSORS | {"strided": strided}, FACTS)
    found = read_artifact(path, "plan", IDENTITY)
    assert found.path == path and found.facts == FACTS == check_artifact(path, "plan", IDENTITY)
    assert found.tensors.keys() == TENSORS.keys() | {"strided"}
    for name, expected in (TENSORS | {"strided": strided}).items():
        assert found.tensors[name].dtype == expected.dtype
        np.testing.assert_array_equal(found.tensors[name], expected)
    with pytest.raises(ArtifactError, match=r"'b' is float32 \(5,\), not float16 \(5,\); make it"):
        found.tensor("b", np.float16, (5,))
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    write_artifact(path, "plan", IDENTITY, {}, {})
    again = read_artifact(path, "plan", IDENTITY)
    assert not again.tensors and not again.facts


def test_missing_or_truncated_anywhere(file: Path) -> None:
    for kind in COMMANDS:
        assert f"there is no {kind} file" in refused(file.parent / "none", kind)
    assert "there is no profile file" in refused(file.parent)
    content = file.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 9, len(content) - 1}:
        file.write_bytes(content[:length])
        assert "damaged" in refused(file)
    file.write_bytes(content + b"\0")
    assert "damaged" in refused(file)


@settings(max_examples=60)
@given(at=st.integers(0, 600), value=st.integers(0, 255))
def test_a_changed_byte_of_the_header_is_refused_or_harmless(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "changed")
    content = bytearray(path.read_bytes())
    at %= 8 + int.from_bytes(content[:8], "little")
    content[at] = value
    path.write_bytes(content)
    try:
        read_artifact(path, "profile", IDENTITY)
    except ArtifactError as problem:
        assert str(path) in str(problem) and len(str(problem).splitlines()) == 1


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"other": "{}"},
        {"hotcold": "{"},
        {"hotcold": "[]"},
        {"hotcold": "[" * 100_000},
        {"hotcold": "9" * 10_000},
    ],
)
def test_another_programs_file(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata)
    refused(path)


def rewrite(path: Path, **changes: Any) -> None:
    """A file whose description differs from a right one in `changes`."""
    about = {"kind": "profile", "version": VERSION, "model_name": IDENTITY.name,
             "model_digest": IDENTITY.digest, "facts": FACTS} | changes  # fmt: skip
    save_file(TENSORS, path, {"hotcold": json.dumps(about)})


def test_files_that_do_not_fit(file: Path) -> None:
    rewrite(file)
    read_artifact(file, "profile", IDENTITY)
    assert "is a 'profile' file, not a plan file" in refused(file, "plan")
    rewrite(file, version=VERSION + 1)
    assert f"is of version {VERSION + 1}, this program reads version {VERSION}" in refused(file)
    rewrite(file, version="x\ny" * 500)
    assert len(refused(file)) < 600
    rewrite(file, facts=[1])
    assert "holds no facts" in refused(file)
    rewrite(file, model_name="x\ny\x1b" * 500)
    text = refused(file, identity=ModelIdentity("other", "cd" * 32))
    assert "belongs to the model 'x" in text and ", not to 'other'; make" in text
    assert text.isprintable()
    for digest in (None, "ab" * 31 + "ac"):
        rewrite(file, model_digest=digest)
        told = (
            "belongs to the model 'mine', not to this 'mine', whose config.json or weights differ"
        )
        assert told in refused(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("opt-prenorm", tmp_path_factory.mktemp("model"), dtype="bfloat16")


def test_a_moved_model_is_the_same(model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "moved")
    found, moved = ModelIdentity.of(model), ModelIdentity.of(path)
    assert found.digest == moved.digest and moved.name == "moved"
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    moved = ModelIdentity.of(path)
    assert moved.digest == found.digest and moved.content == found.content
    write_artifact(tmp_path / "f", "plan", found, {}, {})
    read_artifact(tmp_path / "f", "plan", moved)
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 77}))
    text = refused(tmp_path / "f", "plan", ModelIdentity.of(path))
    assert f"belongs to the model '{model.name}'" in text and "not to 'moved'" in text


def change_in_place(file: Path, place: int) -> None:
    """Change a bit of a file as a careless or a hostile program would: size and time stay."""
    found = file.stat()
    with file.open("r+b") as stream:
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([old ^ 1]))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_any_number_changed_in_place_is_another_model(model: Path, tmp_path: Path) -> None:
    """Of any tensor, wherever it lies; a copy of the old model is the old one, on any host."""
    path = shutil.copytree(model, tmp_path / "copy")
    weights, original = path / "model.safetensors", model / "model.safetensors"
    write_artifact(tmp_path / "f", "predictors", ModelIdentity.of(path), {}, {})
    entries = SafetensorsFile(weights).entries
    assert len(entries) > 40
    for entry in entries.values():
        place = (entry.start + entry.end) // 2
        change_in_place(weights, place)
        told = refused(tmp_path / "f", "predictors", ModelIdentity.of(path))
        assert "to the model 'copy', not to this 'copy', whose config.json or weights" in told
        change_in_place(weights, place)
    assert weights.read_bytes() == original.read_bytes()
    read_artifact(tmp_path / "f", "predictors", ModelIdentity.of(path))
    read_artifact(tmp_path / "f", "predictors", ModelIdentity.of(model))


def test_the_weights_are_read_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again while their files stay as they are, by another process either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = shutil.copytree(model, tmp_path / "copy")
    hashed: list[Path] = []
    make = weights_digest._hashed

    def noted(files: weights_digest.ModelFiles) -> str:
        hashed.append(files.model)
        return make(files)

    monkeypatch.setattr(weights_digest, "_hashed", noted)
    first = ModelIdentity.of(path).content
    weights_digest._known.clear()  # as another process
    assert ModelIdentity.of(path).content == first and len(hashed) == 1
    (kept,) = (tmp_path / "cache/hotcold/weights").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])  # cut short by a full disk
    weights_digest._known.clear()
    assert ModelIdentity.of(path).content == first and len(hashed) == 2
    os.utime(path / "model.safetensors")
    assert ModelIdentity.of(path).content == first and len(hashed) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # nothing can be kept there
    os.utime(path / "model.safetensors")
    assert ModelIdentity.of(path).content == ModelIdentity.of(path).content == first
    assert len(hashed) == 4


def test_a_file_that_names_no_weights_is_taken_while_it_is_younger(
    model: Path, tmp_path: Path
) -> None:
    """As earlier versions wrote them."""
    path = shutil.copytree(model, tmp_path / "copy")
    weights = path / "model.safetensors"
    newest = max(file.stat().st_ctime_ns for file in path.iterdir())
    about = {"kind": "profile", "version": VERSION, "model_name": "copy", "facts": FACTS,
             "model_digest": ModelIdentity.of(path).digest}  # fmt: skip
    file = tmp_path / "f"
    while not file.exists() or file.stat().st_mtime_ns <= newest:  # the kernel's clock ticks
        save_file(TENSORS, file, {"hotcold": json.dumps(about)})
    read_artifact(file, "profile", ModelIdentity.of(path))
    large = max(
        SafetensorsFile(weights).entries.values(), key=lambda entry: entry.end - entry.start
    )
    while weights.stat().st_ctime_ns <= file.stat().st_mtime_ns:
        change_in_place(weights, large.end - 1)
    assert ModelIdentity.of(path).digest == about["model_digest"]
    told = refused(file, identity=ModelIdentity.of(path))
    assert "the model's files have changed since it was made; make one for it" in told


def unwritable(path: Path) -> str:
    with pytest.raises(ArtifactError, match=r"cannot be written .*; give another place") as caught:
        write(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    unwritable(tmp_path / "text" / "file")
    unwritable(tmp_path)
    unwritable(tmp_path / ("n" * 250))
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


def test_a_full_disk_leaves_the_old_file(file: Path) -> None:
    before = file.read_bytes()
    with files_of_at_most(20):
        assert "File too large" in unwritable(file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_an_interrupt_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(file)
    assert list(file.parent.iterdir()) == [file]


def test_formats_that_numpy_lacks(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    about = {"kind": "profile", "version": VERSION, "model_digest": IDENTITY.digest, "facts": {}}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensors = {"a": torch.ones(3).to(dtype)}
        save_torch_file(tensors, path, {"hotcold": json.dumps(about)})
        with pytest.raises(ArtifactError, match="damaged") as caught:
            read_artifact(path, "profile", IDENTITY)
        assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "part.safetensors"])
def test_weights_of_other_forms_changed_in_place(name: str, model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "copy")
    tensors, file = load_file(path / "model.safetensors"), path / name
    (path / "model.safetensors").unlink()
    if name == "pytorch_model.bin":
        torch.save(tensors, file)
    else:
        save_torch_file(tensors, file)
        index = {"weight_map": dict.fromkeys(tensors, name)}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = ModelIdentity.of(path)
    found = before.content
    assert ModelIdentity.of(path).content == found
    change_in_place(file, file.stat().st_size // 2)
    assert ModelIdentity.of(path).content != found
    with pytest.raises(CheckpointError, match="its files have changed meanwhile"):
        assert before.content
