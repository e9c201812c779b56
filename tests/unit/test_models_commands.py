"""`hotcold pull`, `list` and `rm`, against a hub served here; which files make a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.errors import UsageError
from hotcold.model.files import hub
from hotcold.model.synthetic.shape import SHAPES, config_json
from hotcold.placement.machine.description import write_machine
from tests.e2e import commands
from tests.e2e.commands import Outcome
from tests.full_disk import files_of_at_most
from tests.local_hub import Hub, serving
from tests.placement_cases import make_machine

WEIGHTS = os.urandom(25_000_000)  # more than the library writes at once
CONFIG = {name: f"{{}}  {name}".encode() for name in ("config.json", "tokenizer.json")}
QUANTS = ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "big/model-F16-00001-of-00002.gguf",
          "big/model-F16-00002-of-00002.gguf"]  # fmt: skip
REPOSITORIES = {
    "org/small": {
        **CONFIG, "model.safetensors": WEIGHTS, "chat_template.jinja": b"t", "README.md": b"x",
        "pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"x", "training_args.bin": b"a pickle",
    },
    "org/many": {"config.json": b"{}", **{name: name.encode() for name in QUANTS}},
}  # fmt: skip


@pytest.fixture
def local_hub() -> Iterator[Hub]:
    with serving(REPOSITORIES) as found:
        yield found


Commands = Callable[..., Outcome]


def of_hub(url: str, cache: Path) -> Commands:
    """Runs commands that know one hub and one cache."""
    own = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return lambda *arguments, **changes: commands.run(*arguments, changes=own | changes)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(local_hub: Hub, tmp_path: Path) -> Commands:
    return of_hub(local_hub.url, tmp_path / "cache")


@pytest.mark.parametrize(
    ("names", "part", "files"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], None,
         ("config.json", "model.safetensors")),
        (["config.json", "merges.txt", "pytorch_model.bin", "pytorch_model.bin.index.json"], None,
         ("config.json", "merges.txt", "pytorch_model.bin.index.json", "pytorch_model.bin")),
        (["config.json", "model.safetensors", "x.gguf"], "x", ("x.gguf",)),
        (["a/x-00002-of-00002.gguf", "a/x-00001-of-00002.gguf", "x-00001-of-00002.gguf.md"], None,
         ("a/x-00001-of-00002.gguf", "a/x-00002-of-00002.gguf")),
        (QUANTS, "q8_0", ("model-Q8_0.gguf",)),
        (["x.gguf", "x-2.gguf"], "x", ("x.gguf",)),
        *((["m-F16.gguf", name], part, ("m-F16.gguf",))
          for name, part in (("mmproj-F16.gguf", "F16"), ("m-mmproj.F16.gguf", "f16"),
                             ("imatrix.gguf", None), ("MTP/m-mtp-F16.gguf", "F16"),
                             ("m-draft-F16.gguf", "f16"))),
        (["mmproj-F16.gguf", "m-F16.gguf"], "mmproj-F16", ("mmproj-F16.gguf",)),
        (["m-DRAFT-Q4_0.gguf", "m-DRAFT-F16.gguf"], "F16", ("m-DRAFT-F16.gguf",)),
        (["m-DRAFT-Q4_0.gguf", "m-Q4_0.gguf"], "draft", ("m-DRAFT-Q4_0.gguf",)),
        *((["m-UD-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "b/m-Q4_K_M-00001-of-00001.gguf",
            "m-Q4_K_M_L.gguf", "m-BF16.gguf", "m-F16.gguf"], part, (name,))
          for part, name in (("Q4_K_M", "b/m-Q4_K_M-00001-of-00001.gguf"), ("F16", "m-F16.gguf"),
                             ("ud-q4_k_m", "m-UD-Q4_K_M.gguf"), ("BF16", "m-BF16.gguf"),
                             ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"))),
    ],
)  # fmt: skip
def test_what_is_needed(names: list[str], part: str | None, files: tuple[str, ...]) -> None:
    assert hub.choose_files("org/x", names, part).files == files


@pytest.mark.parametrize(
    ("names", "part", "says"),
    [
        ([], None, "no model"),
        (["config.json", "pytorch_lora.bin", "model.onnx"], None, "no model"),
        (QUANTS, None, "3 GGUF models; choose one by org/x:NAME: model-F16-00001-of-00002.gguf"),
        (["mmproj-F16.gguf", "imatrix.gguf"], None, "no model"),
        (["mmproj-F16.gguf", "a-F16.gguf", "b-F16.gguf"], "F16",
         "2 GGUF models .*by org/x:NAME: a-F16.gguf, b-F16.gguf$"),
        (QUANTS, "Q2_K", "no GGUF models with 'Q2_K' in the name"),
        ([f"{n}.gguf" for n in range(100)], None, "and 88 more"),
    ],
)  # fmt: skip
def test_what_is_refused(names: list[str], part: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hub.choose_files("org/x", names, part)


def test_fetched_listed_removed(local_hub: Hub, run: Commands) -> None:
    done = run("pull", "org/small", "--json")
    assert "25.0 MB in 4 files, 25.0 MB to be fetched" in done.err
    folder = Path(done.report["path"])
    expected = {*CONFIG, "model.safetensors", "chat_template.jinja"}
    assert {file.name for file in folder.iterdir()} == expected == set(local_hub.fetched())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    num_bytes = sum(len(REPOSITORIES["org/small"][name]) for name in expected)
    assert done.report["missing_bytes"] == done.report["num_bytes"] == num_bytes
    (kept,) = run("list", "--json").report["models"]
    assert (kept["model"], kept["form"], kept["path"]) == ("org/small", "safetensors", str(folder))
    assert run("rm", "org/small").status != 0 and folder.exists()  # nobody there to say yes
    assert run("rm", "org/small", "--yes").out == "org/small: 25.0 MB freed\n"
    assert not folder.exists()


def test_a_known_name_stands_for_its_repository(run: Commands, tmp_path: Path) -> None:
    names = tmp_path / "settings" / "hotcold" / "models.toml"
    names.parent.mkdir(parents=True)
    names.write_text('"house:8b" = "org/many:Q8_0"')
    settings: Any = {"XDG_CONFIG_HOME": str(tmp_path / "settings")}
    done = run("pull", "house:8b", **settings)
    assert done.err.startswith("house:8b is org/many:Q8_0: 15 B in 1 file,")
    assert done.out.rstrip().endswith("model-Q8_0.gguf")
    assert "(did you mean org/many, which is here?)" in run("generate", "org/man").refusal
    assert run("rm", "house:8b", "--yes", **settings).out.startswith("org/many:model-Q8_0.gguf: ")


def test_one_of_several_gguf_models(local_hub: Hub, run: Commands) -> None:
    for name in ("Q8_0", "F16"):
        assert run("pull", f"org/many:{name}").status == 0
    assert sorted(local_hub.fetched()) == sorted(Path(name).name for name in QUANTS[1:])
    names = [f"org/many:{Path(QUANTS[n]).name}" for n in (2, 1)]
    refusal = run("rm", "org/many:model", "--yes").refusal
    assert refusal.endswith(f"is in the names of {', '.join(names)}; name one")
    assert run("rm", "org/many:q8", "--yes").out.startswith("org/many:model-Q8_0.gguf: ")
    models = run("list", "--json").report["models"]
    assert [model["model"] for model in models] == names[:1]
    assert all(Path(model["path"]).exists() for model in models)


def test_a_file_goes_in_all_revisions(
    tmp_path: Path, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing goes that another file has the bytes of."""
    repo = tmp_path / "cache" / "hub" / "models--org--many"
    (repo / "blobs").mkdir(parents=True)
    for blob in ("old", "new", "shared", "other"):
        (repo / "blobs" / blob).write_bytes(blob.encode() * 2_000_000)
    revisions: dict[str, dict[str, str]] = {
        "a" * 40: {"x.gguf": "old", "y.gguf": "shared"},
        "b" * 40: {"x.gguf": "new", "y.gguf": "other"},
        "c" * 40: {"x.gguf": "shared"},
    }
    for revision, files in revisions.items():
        (repo / "snapshots" / revision).mkdir(parents=True)
        for name, blob in files.items():
            (repo / "snapshots" / revision / name).symlink_to(f"../../blobs/{blob}")
    told = run("rm", "org/many:x.gguf", "--yes").out
    assert told == "org/many:x.gguf: 12.0 MB freed in 3 revisions\n"
    listed = run("list").out
    assert "x.gguf" not in listed and listed.count("y.gguf") == 2
    assert {blob.name for blob in (repo / "blobs").iterdir()} == {"shared", "other"}
    left = {path.resolve().name for path in repo.glob("snapshots/*/*")}
    assert left == {"shared", "other"}
    told = run("rm", "org/many:y.gguf", "--yes").out
    assert told == "org/many:y.gguf: 22.0 MB freed in 2 revisions\n"
    assert not repo.exists()


def test_a_download_goes_on_where_it_stopped(local_hub: Hub, run: Commands) -> None:
    local_hub.breaks_after["model.safetensors"] = 15_000_000
    for _ in range(2):  # the library tries again by itself, where it can
        done = run("pull", "org/small", "--json")
    folder = Path(done.report["path"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert any(line.startswith("model.safetensors from ") for line in local_hub.ranges)


def test_a_disk_that_fills_is_told_as_that(run: Commands) -> None:
    with files_of_at_most(1_000_000):
        done = run("pull", "org/small")
    assert (done.status, done.out) == (1, "") and "Traceback" not in done.err
    (line,) = [line for line in done.error_lines if "error" in line]
    assert "File too large" in line and "HF_HOME" in line and "network" not in line
    assert "org/small  unfinished" in run("list").out


def test_a_plan_fetches_config_json_alone(local_hub: Hub, run: Commands, tmp_path: Path) -> None:
    text = json.dumps(config_json(SHAPES["tiny"], "float16")).encode()
    local_hub.repositories = {"org/planned": {"config.json": text, "model.safetensors": WEIGHTS}}
    machine = tmp_path / "machine.json"
    write_machine(machine, make_machine())
    done = run("plan", "--config", "org/planned", "--machine", str(machine))
    assert done.status == 0, done.err
    assert "tokens/s" in done.out and "weights are not here" in done.out
    assert local_hub.fetched() == ["config.json"]


def test_offline_what_is_here_is_found(run: Commands) -> None:
    assert run("pull", "org/many:Q8_0").status == 0
    assert run("pull", "org/many:Q8_0", HF_HUB_OFFLINE="1").status == 0


def test_one_that_is_not_there_or_not_public(tmp_path: Path) -> None:
    with serving(REPOSITORIES, token="hf_secret") as closed:
        run = of_hub(closed.url, tmp_path)
        assert "HF_TOKEN" in run("pull", "org/small").refusal
        assert run("pull", "org/small", HF_TOKEN="hf_secret").status == 0
        told = run("generate", "org/none", "--prompt", "a", HF_TOKEN="hf_secret").refusal
        assert "hotcold list" in told and "hotcold pull" in told


def test_a_disk_without_room_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="hotcold rm"):
        hub.require_space(hub.Download(1, 1 << 62, 1 << 62))
    hub.require_space(hub.Download(1, 1 << 62, 0))
