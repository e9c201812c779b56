"""Where GGUF files lie: in parts, in folders, behind links."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.files.locate import locate_model, resolved_model
from tests.reference import reference_logits
from tests.unit.test_gguf_model import IDS, file_of, tiny


def test_parts(tmp_path: Path) -> None:
    file_of(tiny(), tmp_path / "whole.gguf")
    parts = split(tmp_path / "whole.gguf", tmp_path / "parts", 7)
    assert len(parts) > 2
    assert locate_model(str(tmp_path / "parts")) == parts[0]
    assert np.array_equal(
        reference_logits(parts[0], IDS), reference_logits(tmp_path / "whole.gguf", IDS)
    )
    whole, cut = ModelIdentity.of(tmp_path / "whole.gguf"), ModelIdentity.of(parts[0])
    assert (whole.digest, whole.content) == (cut.digest, cut.content)
    content = bytearray(parts[-1].read_bytes())
    content[-40] ^= 1  # in the last tensor
    parts[-1].write_bytes(content)
    assert ModelIdentity.of(parts[0]).content != whole.content
    content[-40] ^= 1
    parts[-1].write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is part 2 of .*-00001-of-"):
        read_config(parts[1])
    lone = tmp_path / "lone" / parts[0].name
    lone.parent.mkdir()
    parts[0].rename(lone)
    with pytest.raises(CheckpointError, match=r"part tiny-00002-of-.* is missing"):
        read_config(lone)


def split(path: Path, folder: Path, most: int) -> list[Path]:
    """Write a file again in parts of so many tensors."""
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama", split_max_tensors=most)
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            value = field.contents()
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_a_file_that_is_not_there_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is not asked for it; a part of a repository's file may have that name."""
    asked, name = [], "folder/none.gguf"

    def find(repo: str, part: str) -> None:
        asked.append((repo, part))
        raise UsageError("asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hotcold.model.files.hub.find", find)
    with pytest.raises(UsageError, match=f"^'{name}': there is no such file or folder$"):
        locate_model(name)
    with pytest.raises(UsageError, match="asked"):
        locate_model("org/repo:none.gguf")
    assert asked == [("org/repo", "none.gguf")]


def test_a_links_name_is_kept(tmp_path: Path) -> None:
    """In huggingface_hub's cache, files are links to names that say nothing."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    file_of(tiny(), tmp_path / "blobs" / "0123")
    link = tmp_path / "snapshot" / "tiny.gguf"
    link.symlink_to(tmp_path / "blobs" / "0123")
    assert resolved_model(link) == link
    assert read_config(link).name == "tiny"
    assert artifact_path(link, "profile") == tmp_path / "snapshot" / "hotcold" / "tiny" / "profile"
    assert artifact_path(tmp_path, "profile") == tmp_path / "hotcold" / "profile"
