"""What users name as a model: files by their content, in parts, Ollama's, and what is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.cli import main
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, ConfigError, HotcoldError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.files.locate import DEMO_DIRECTORY, locate_model, resolved_model
from hotcold.model.files.ollama import ollama_file
from hotcold.model.text.chat_template import ChatTemplate
from tests.gguf_files import Draft, small_llama
from tests.reference import reference_logits
from tests.unit.test_gguf_model import IDS, file_of, tiny

CONFIG = (DEMO_DIRECTORY / "config.json").read_bytes()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4567890\n"
DIGEST = "0" * 63 + "1"


def gguf_of(**keys: str) -> bytes:
    return Draft().with_keys(**keys).content()


def layers_of_drafts() -> Draft:
    """A file of the converter's `--mtp`: the layers after a model's own, and its embedding."""
    made = small_llama(layers=2).with_keys(llama__nextn_predict_layers=1)
    kept = (tensor for tensor in made.tensors if not tensor.name.startswith("blk.0."))
    return replace(made, tensors=tuple(kept))


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder, with one model and its manifest as Ollama writes them."""
    folder = tmp_path / "models"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"sha256-{DIGEST}").write_bytes(gguf_of())
    for tag in ("latest", "1b"):
        write_manifest(folder / "manifests/registry.ollama.ai/library/small" / tag)
    write_manifest(folder / "manifests/hf.co/org/repo/Q4_K_M")
    return folder


def write_manifest(path: Path, kind: str = "model", digest: str = f"sha256:{DIGEST}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:ff", "size": 1},
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 1},
    ]
    path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))


def test_what_stands_for_a_model(tmp_path: Path) -> None:
    """A GGUF file is known by its content."""
    other = tmp_path / "sha256-0123"
    other.write_bytes(gguf_of())
    assert locate_model(str(other)) == other
    for name in ("A.GGUF", "mmproj-A.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(gguf_of())
    parts = [str(tmp_path / f"b-0000{n}-of-00002.gguf") for n in (1, 2)]
    assert {locate_model(part) for part in parts} == {Path(parts[0])}
    with pytest.raises(UsageError, match="holds 2 GGUF models"):
        locate_model(str(tmp_path))
    for part in parts:
        Path(part).unlink()
    assert locate_model(str(tmp_path)) == tmp_path / "A.GGUF"
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "model.safetensors").touch()
    assert locate_model(str(tmp_path / "model.safetensors")) == tmp_path


def test_what_stands_beside_a_model_is_none(tmp_path: Path) -> None:
    """By its name, or by what its header says."""
    files = {
        "m-F16.gguf": gguf_of(general__architecture="llama"),
        "mmproj-F16.gguf": b"",
        "m.imatrix.gguf": b"",
        "m-MTP-F16.gguf": b"",
        "eyes.gguf": gguf_of(general__architecture="clip"),
        "tuned.gguf": gguf_of(general__architecture="llama", general__type="adapter"),
        "weights.gguf": gguf_of(general__architecture="llama", general__type="imatrix"),
        "drafts.gguf": layers_of_drafts().content(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert locate_model(str(tmp_path)) == tmp_path / "m-F16.gguf"
    with pytest.raises(ConfigError, match=r"drafts.gguf: guesses tokens ahead .*the model's own"):
        read_config(tmp_path / "drafts.gguf")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"holds 2 GGUF models; .*damaged.gguf, .*m-F16.gguf$"):
        locate_model(str(tmp_path))


def test_ollamas_models_have_their_names(ollama: Path) -> None:
    file = ollama / "blobs" / f"sha256-{DIGEST}"
    manifest = ollama / "manifests/registry.ollama.ai/library/small/1b"
    names = (f"ollama:{name}" for name in ("small", "small:1b", "hf.co/org/repo:Q4_K_M"))
    for name in (*names, str(file), str(manifest)):
        assert locate_model(name) == file
    for name in ("other", "small:7b", "", "../small"):
        with pytest.raises(
            UsageError, match=r"there are: ollama:hf\.co/org/repo:Q4_K_M, ollama:sm"
        ):
            ollama_file(name)


def test_ollamas_models_that_cannot_be_used(ollama: Path) -> None:
    library = ollama / "manifests/registry.ollama.ai/library"
    write_manifest(library / "tuned/latest", kind="adapter")
    write_manifest(library / "leads/latest", digest="sha256:../../../etc/passwd")
    write_manifest(library / "gone/latest", digest=f"sha256:{'f' * 64}")
    (library / "bad").mkdir()
    (library / "bad/latest").write_bytes(b"[1]")
    for name, says in [("tuned", "adapter"), ("leads", "names no model"), ("gone", "pull it again"),
                       ("bad", "JSON list")]:  # fmt: skip
        with pytest.raises(HotcoldError, match=says):
            ollama_file(name)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"adapter_config.json": b'{"base_model_name_or_path": "a/b"}'}, "is an adapter of a/b"),
        ({"adapter_config.json": b"{}", "config.json": CONFIG}, "is an adapter, and no"),
        ({"model.onnx": b""}, "ONNX"),
        ({"consolidated.safetensors": b"", "params.json": b"{}"}, "makers' own form"),
        ({"weights.00.npz": b"", "config.json": CONFIG}, "MLX"),
        ({"model_index.json": b"{}"}, "diffusers"),
        ({"modules.json": b"[]", "config.json": b'{"model_type": "bert"}'}, "'bert', which is not"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}, "tokenizer alone"),
        ({"optimizer.pt": b"", "trainer_state.json": b"{}"}, "training's state"),
        ({"checkpoint-10/config.json": CONFIG}, "checkpoints of a training"),
        ({"snapshots/abc/config.json": CONFIG, "refs/main": b""}, "ORG/REPO"),
        ({"model.safetensors": b""}, "without config.json"),
        ({"config.json": POINTER}, "config.json: is Git LFS's .* `git lfs pull`"),
        ({"a.gguf": POINTER}, "a.gguf: is Git LFS's"),
        (
            {
                "config.json": CONFIG,
                "tokenizer.json": POINTER,
                "model.safetensors": (DEMO_DIRECTORY / "model.safetensors").read_bytes(),
            },
            "tokenizer.json: is Git LFS's",
        ),
        ({"a.gguf": gguf_of(general__type="adapter", general__architecture="llama")}, "LoRA"),
        ({"a.gguf": gguf_of(general__architecture="clip")}, "reads pictures"),
        ({"a.gguf": gguf_of(general__type="imatrix")}, "which weights matter"),
        ({"a.gguf": gguf_of(general__architecture="t5")}, "'t5', which is not supported"),
        ({"a.gguf": b"lmgg" * 9}, "no GGUF file"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_is_no_model_is_said_in_one_line(
    files: dict[str, bytes], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert main(["show", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hotcold: error: {tmp_path}")
    assert re.search(says, line), line


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "old.bin").write_bytes(b"tjgg" + bytes(100))
    (tmp_path / "weights").write_bytes(POINTER)
    for name, says in [("config.json", f"its directory, {tmp_path}"), ("old.bin", "before GGUF"),
                       ("weights", "git lfs pull")]:  # fmt: skip
        with pytest.raises(HotcoldError, match=says):
            locate_model(str(tmp_path / name))
    with pytest.raises(UsageError, match="neither a directory nor a file with content"):
        locate_model("/dev/null")


def of_types(path: Path, *types: int) -> Path:
    """A Llama whose last tensors have these of ggml's types, by number."""
    made = small_llama(width=256)
    ends = dict(zip(range(-len(types), 0), types, strict=True))
    tensors = [
        replace(tensor, type=ends.get(place - len(made.tensors), 0))
        for place, tensor in enumerate(made.tensors)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(replace(made, tensors=tuple(tensors)).content())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HotcoldError) as caught:
        read_model(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(str(path)) and "download it again" not in line
    return line


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ([31, 31], r"2 of type 31 \(Q4_0_4_4\), which old builds .*take the model's Q4_0 file"),
        ([5, 5], r"2 of \d+ tensors cannot be read: 2 of type 5 \(Q4_3\), .* removed in 2023"),
        ([43], "type 43, of a newer llama.cpp; take a file in another format"),
        ([9, 15, 9], r"3 of \d+ tensors .*: Q8_1 \(2\), Q8_K \(1\); take a file in these: F32,"),
    ],
)
def test_types_that_are_not_read(types: list[int], says: str, tmp_path: Path) -> None:
    assert re.search(says, refusal(of_types(tmp_path / "m.gguf", *types)))


def test_files_that_load_are_named(tmp_path: Path) -> None:
    path = of_types(tmp_path / "m-UD-Q4_K_XL.gguf", 9, 15, 9)
    of_types(tmp_path / "m-Q8_1.gguf", 9)
    of_types(tmp_path / "mmproj-F32.gguf")
    good = of_types(tmp_path / "m-Q8_0.gguf", 8)
    assert refusal(path).endswith(f"Q8_K (1); take one that loads: {good}")


def test_files_of_the_repository_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["m-Q8_K.gguf", "m-Q4_K_M.gguf", "m-IQ4_NL.gguf",
             "m-Q4_0_4_4.gguf", "mmproj-F16.gguf", "b/m-BF16-00001-of-00002.gguf",
             "b/m-BF16-00002-of-00002.gguf", "config.json"]  # fmt: skip
    siblings = [SimpleNamespace(rfilename=name) for name in names]
    asked = []

    def model_info(repo_id: str, **options: Any) -> SimpleNamespace:
        asked.append(repo_id)
        return SimpleNamespace(siblings=siblings)

    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    folder = tmp_path / "models--org--m-GGUF" / "snapshots" / "0123"
    line = refusal(of_types(folder / "m-Q8_K.gguf", 15))
    found = ["m-BF16-00001-of-00002.gguf", "m-IQ4_NL.gguf", "m-Q4_K_M.gguf"]
    told = ", ".join(f"org/m-GGUF:{name}" for name in found)
    assert line.endswith(f"take one that loads: {told}") and asked == ["org/m-GGUF"]

    def offline(repo_id: str, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.model_info", offline)
    assert "take a file in these: " in refusal(folder / "m-Q8_K.gguf")


def test_a_chat_template_is_the_models_own_file(tmp_path: Path) -> None:
    """What a template says reaches whoever asks; a link may lead to any file of the user."""
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "key").write_text("secret")
    (folder / "own").write_text("{{ messages }}")
    (folder / "chat_template.jinja").symlink_to("own")
    assert ChatTemplate.from_directory(folder) is not None
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "key")
    with pytest.raises(HotcoldError, match=r"chat_template.jinja: is a link out of the model's"):
        ChatTemplate.from_directory(folder)


def test_parts(tmp_path: Path) -> None:
    file_of(tiny(), tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    tiny().write(tmp_path / "parts" / "tiny.gguf", most=7)
    parts = sorted((tmp_path / "parts").iterdir())
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
