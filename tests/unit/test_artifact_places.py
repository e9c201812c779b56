"""Where artifacts are written and read, with and without HOTCOLD_ARTIFACTS."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.jobs.profile.files import ProfileFiles
from hotcold.jobs.running.identity import identity_of
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import (
    ARTIFACTS,
    artifact_folders,
    artifact_path,
    artifacts_like,
)
from hotcold.model.files.locate import DEMO_DIRECTORY, locate_model
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from tests.tiny_models import make_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("llama-relu", tmp_path / "models" / "tiny")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    monkeypatch.setenv(ARTIFACTS, str(folder))
    return folder


def profile_of(model: Path, num_tokens: int) -> ActivationProfile:
    config = read_config(model)
    shape = config.num_layers, max(config.ffn_sizes)
    return ActivationProfile(np.zeros(shape, np.int64), num_tokens, "a text", "0" * 64)


def test_nothing_is_written_beside_the_model_with_it(model: Path, elsewhere: Path) -> None:
    before = sorted(model.rglob("*"))
    files = ProfileFiles.choose(model, None, None, None, with_inputs=True)
    config, identity = read_config(model), ModelIdentity.of(model)
    write_profile(files.profile, identity, profile_of(model, 7))
    file = pack_model(model, config, "")
    assert all(elsewhere in path.parents for path in (*files.all, file))
    assert sorted(model.rglob("*")) == before
    # And all of it is read there.
    found = own_profile(model, config)
    assert found is not None and found.num_tokens == 7
    assert has_bundles(model, config) and bundle_path(model, BundleGeometry.of(config)) == file


def test_what_lies_beside_the_model_is_read_until_there_is_another(
    model: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, identity = read_config(model), ModelIdentity.of(model)
    monkeypatch.delenv(ARTIFACTS)
    write_profile(artifact_path(model, PROFILE_FILE), identity, profile_of(model, 1))
    pack_model(model, config, "")
    monkeypatch.setenv(ARTIFACTS, str(elsewhere))

    def num_tokens() -> int:
        found = own_profile(model, config)
        assert found is not None
        return found.num_tokens

    assert num_tokens() == 1 and has_bundles(model, config)
    assert artifacts_like(model, "*") == sorted((model / "hotcold").iterdir())
    written = ProfileFiles.choose(model, None, None, None, with_inputs=False).profile
    write_profile(written, identity, profile_of(model, 2))
    assert num_tokens() == 2
    monkeypatch.delenv(ARTIFACTS)
    assert num_tokens() == 1


def test_nothing_is_written_into_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ARTIFACTS, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written, read = artifact_folders(locate_model("demo"))
    assert tmp_path in written.parents and read.resolve() == DEMO_DIRECTORY / "hotcold"
    assert artifact_path(DEMO_DIRECTORY, PROFILE_FILE) == read.resolve() / PROFILE_FILE


def test_models_of_one_name_have_folders_of_their_own(model: Path, elsewhere: Path) -> None:
    other = model.parent.parent / "others" / "tiny"
    shutil.copytree(model, other)
    link = model.parent / "link"
    link.symlink_to(model)
    mine, others, same = (artifact_folders(path)[0] for path in (model, other, link))
    assert mine != others and mine == same
    assert {path.parent for path in (mine, others)} == {elsewhere}
    assert mine.name.startswith("tiny-")
    revision = model.parent / "models--org--repo" / "snapshots" / "0a1b"
    assert artifact_folders(revision)[0].name.startswith("org--repo-")


def test_a_relative_folder_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services have other current folders."""
    monkeypatch.setenv(ARTIFACTS, "folder")
    with pytest.raises(UsageError, match="HOTCOLD_ARTIFACTS is 'folder'; give an absolute path"):
        artifact_path(model, "x")


def test_a_new_artifact_makes_another_system(model: Path, elsewhere: Path) -> None:
    """A kept system that was started without the profile is not the one that is asked for."""
    before = identity_of(str(model), SystemOptions())
    write_profile(
        artifact_folders(model)[0] / PROFILE_FILE, ModelIdentity.of(model), profile_of(model, 1)
    )
    assert identity_of(str(model), SystemOptions()) != before
