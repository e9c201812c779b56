"""What `ray job submit --working-dir .` uploads of a checkout, by Ray's own rules."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import (
    create_package,
    get_excludes_from_ignore_files,
    get_uri_for_directory,
)

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (
    "models/qwen.gguf",
    "models/llama/config.json",
    "elsewhere/model-00001-of-00002.safetensors",
    "elsewhere/pytorch_model.bin",
    "data/prompts.jsonl",
    "train.parquet",
    "ids.npy",
)
UPLOADED = ("hotcold/demo/model.safetensors", "hotcold/demo/hotcold/x.safetensors", "in.jsonl")


def test_models_and_data_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model is a part of the program, and a job's requests may lie beside it."""
    checkout = tmp_path / "checkout"
    for name in (*LEFT_OUT, *UPLOADED):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    (checkout / ".rayignore").write_text((ROOT / ".rayignore").read_text())
    monkeypatch.chdir(checkout)
    assert get_excludes_from_ignore_files(checkout, include_gitignore=True)
    packed = tmp_path / "packed.zip"
    create_package(str(checkout), packed, include_gitignore=True)
    with zipfile.ZipFile(packed) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert names == {*UPLOADED, ".rayignore"}
    assert get_uri_for_directory(str(checkout), include_gitignore=True).endswith(".zip")


def test_the_embedded_model_is_among_what_is_uploaded() -> None:
    """Where it lies in this checkout."""
    files = [file.relative_to(ROOT / "demo") for file in (ROOT / "demo").rglob("*.safetensors")]
    left_out = get_excludes_from_ignore_files(ROOT, include_gitignore=False)
    shipped = [ROOT / "hotcold" / "demo" / file for file in files]
    assert shipped and not any(rule(file) for rule in left_out for file in shipped)
