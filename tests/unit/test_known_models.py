"""Well-known names of models: what they stand for, a user's own, and what is suggested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotcold.jobs.cli import main
from hotcold.jobs.running.identity import model_text
from hotcold.model.errors import UsageError
from hotcold.model.files import hub
from hotcold.model.files.known_models import known_models, own_file, repository_of
from hotcold.model.files.locate import DEMO_DIRECTORY, locate_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(hub, "_scan", list)
    monkeypatch.chdir(tmp_path)
    own_file().parent.mkdir(parents=True)
    return tmp_path


def test_each_name_stands_for_a_repository_and_says_its_quantization() -> None:
    known = known_models()
    assert {"qwen3:8b", "gpt-oss:20b", "llama3.2:3b"} <= known.keys()
    for name, model in known.items():
        parsed = hub.REPOSITORY.fullmatch(model)
        assert parsed, name
        assert parsed["name"] or "gguf" not in model.lower(), f"{name} does not say which file"
        assert name == name.lower() and "/" not in name


def test_a_name_is_looked_up_before_the_hub_is_asked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(repo: str, part: str | None) -> None:
        asked.append((repo, part))
        raise UsageError("asked")

    monkeypatch.setattr(hub, "find", find)
    for name in ("qwen3:8b", "qwen3", "qwen3:latest", "gpt-oss:20b", "org/repo:none.gguf"):
        with pytest.raises(UsageError, match="asked"):
            locate_model(name)
    qwen = ("bartowski/Qwen_Qwen3-8B-GGUF", "Q4_K_M")
    gpt_oss, of_a_file = ("openai/gpt-oss-20b", None), ("org/repo", "none.gguf")
    assert asked == [qwen, qwen, qwen, gpt_oss, of_a_file]
    # A kept system of the name is one of the repository, and nothing is asked for it.
    assert model_text("qwen3") == ":".join(qwen) and len(asked) == 5


def test_a_users_own_names_come_first_and_files_before_all(home: Path) -> None:
    own_file().write_text('"qwen3:8b" = "me/mine:Q8_0"\n"house" = "me/house"\n')
    assert repository_of("qwen3:8b") == "me/mine:Q8_0"
    assert repository_of("house") == "me/house"
    assert repository_of("gpt-oss:20b") == "openai/gpt-oss-20b"
    (home / "house").mkdir()
    assert repository_of("house") == "house"
    assert repository_of("org/house") == "org/house" and repository_of("") == ""
    assert repository_of("x" * 5000) == "x" * 5000  # a name that no file can have


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('"a" = 1', "'a' is 1; write it like"),
        ("a = ", "cannot be read: Invalid value"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(content: str, told: str) -> None:
    own_file().write_text(content)
    with pytest.raises(UsageError, match=told) as found:
        repository_of("qwen3")
    assert str(own_file()) in str(found.value) and "\n" not in str(found.value)


def test_the_embedded_model_has_a_name_and_prompts_and_lost_paths_are_no_models() -> None:
    assert locate_model("demo") == locate_model(None) == DEMO_DIRECTORY
    assert model_text("demo") == str(DEMO_DIRECTORY)
    for typed in ("/no/where", "~/zzz", "a/b/c/d", "folder/none.gguf"):
        with pytest.raises(UsageError, match=f"^'{typed}': there is no such file or folder$"):
            locate_model(typed)
    for prompt in ("Why is the sky blue?", "What does cat /etc/passwd do?"):
        with pytest.raises(UsageError, match="is no model; a prompt stands behind MODEL"):
            locate_model(prompt)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen3:8B", "did you mean qwen3:8b?"),
        ("lama3.2", "did you mean llama3.2?"),
        ("qwen3:15b", "known of qwen3: qwen3:0.6b, qwen3:1.7b, "),
        ("llama3.2:1b-q4_K_M", "known of llama3.2: llama3.2:1b, llama3.2:3b"),
        ("zzz", "known names: bamboo, gemma2:2b, gemma3, "),
        ("", ""),
    ],
)
def test_an_unknown_name_is_answered_with_those_like_it(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as found:
        locate_model(typed)
    told = str(found.value).partition("an org/repo id of Hugging Face")[2]
    assert told.removeprefix("; ").startswith(meant) and bool(told) == bool(meant)


def test_all_names_are_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_file().write_text('"house" = "me/house"\n')
    assert main(["list", "--known", "--json"]) == 0
    out, err = capsys.readouterr()
    *lines, said = out.splitlines()
    told = json.loads(said)
    assert told["known"] == known_models() and "leaving them out pays" in err
    assert {"prosparse-llama2", "bamboo", "smallthinker:21b"} <= set(told["sparse"])
    assert not {"house", "qwen3:8b"} & set(told["sparse"])
    assert [line.split() for line in lines] == [
        [*pair, "sparse"] if pair[0] in told["sparse"] else list(pair)
        for pair in sorted(known_models().items())
    ]
    assert "prosparse-llama2:7b" in said and ["house", "me/house"] in [x.split() for x in lines]
