"""Whatever a user gets wrong ends in one line that says what and what to do, and in a status.

Most commands run in this process, where nothing may be started; one of each kind runs as a user
runs it, and so do those whose mistake is found only by a process of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.commands import Outcome, run, run_here
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE, make_tiny

FAILURE, USAGE = 1, 2
IDS = ["--prompt-ids", "1,2,3"]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama-relu", tmp_path_factory.mktemp("good"))


Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One mistake: what is done to a good model, the arguments, and words of the line expected."""

    name: str
    says: tuple[str, ...]
    damage: Damage = lambda model: None
    arguments: tuple[str, ...] | None = None  # after "generate MODEL"
    status: int = FAILURE
    model: str = "{model}"
    command: str = "generate"
    stdin: str | bytes | None = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    stdin_errors: str = "strict"  # what Python does with bytes that are no UTF-8
    own_process: bool = False
    starts_ray: bool = False


def change_config(**values: Any) -> Damage:
    def damage(model: Path) -> None:
        file = model / "config.json"
        config = json.loads(file.read_text()) | values
        file.write_text(json.dumps(config))

    return damage


def write(name: str, content: str | bytes) -> Damage:
    def damage(model: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (model / name).unlink(missing_ok=True)
        (model / name).write_bytes(data)

    return damage


def remove(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def index_names(file_name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / WEIGHTS).unlink()
        (model / INDEX).write_text(json.dumps({"weight_map": {UP: file_name}}))

    return damage


def make_folder(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).mkdir()

    return damage


def truncate(num_bytes: int) -> Damage:
    return lambda model: os.truncate(model / WEIGHTS, num_bytes)


def poison(model: Path) -> None:
    """Put NaN in the middle of a tensor."""
    data = bytearray((model / WEIGHTS).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    first, last = json.loads(data[8 : 8 + length])[UP]["data_offsets"]
    at = 8 + length + (first + last) // 8 * 4
    data[at : at + 4] = np.float32("nan").tobytes()
    (model / WEIGHTS).write_bytes(data)


class _Payload:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._file, "w")


def pickle_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()
    content = {"model.norm.weight": _Payload(model / "executed")}
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))


def add_template(text: str) -> Damage:
    def damage(model: Path) -> None:
        add_tokenizer(model)
        (model / "chat_template.jinja").write_text(text)

    return damage


CHAT = ("--chat", "--prompt", "w1")
TEXT = ("--prompt", "w1")


def option(name: str, value: str, *says: str, status: int = FAILURE) -> Case:
    return Case(
        f"{name}={value[:20]}", says or (name.strip("-").replace("-", "_"),),
        arguments=(*IDS, name, value), status=status,
    )  # fmt: skip


CASES = [
    # weights
    Case("no-weights", ("no model.safetensors", "give a directory"), remove(WEIGHTS)),
    Case("truncated-data", ("model.safetensors", "truncated", "download"), truncate(150_000)),
    Case("weights-a-folder", (WEIGHTS, "directory"), make_folder(WEIGHTS)),
    Case("index-leads-elsewhere", ("../../etc/passwd", "download"),
         index_names("../../etc/passwd")),
    Case("pickle", ("pytorch_model.bin", "download"), pickle_weights),
    # config.json
    Case("no-config", ("holds weights without config.json", "download"), remove("config.json")),
    Case("config-not-json", ("config.json", "not valid JSON"), write("config.json", "{'a': 1}")),
    Case("config-deep", ("config.json", "not valid JSON"), write("config.json", "[" * 200_000)),
    Case("huge-number", ("hidden_size", "give a whole number"), change_config(hidden_size=10**40)),
    Case("architecture", ("NovelForCausalLM", "README.md lists the families"),
         change_config(architectures=["NovelForCausalLM"], model_type="novel")),
    Case("end-token-out-of-range", ("generation_config.json", "eos_token_id", "give token ids"),
         write("generation_config.json", '{"eos_token_id": 5000}')),
    # memory
    Case("cpu-memory", ("needs", "KiB are allowed", "--cpu-memory"),
         arguments=(*IDS, "--cpu-memory", "1MB")),
    # MODEL
    Case("model-a-file", ("is a file", "or its directory"), model="{model}/config.json"),
    Case("model-missing", ("there is no such file or folder",), model="{model}/no/such"),
    Case("model-empty", ("neither a directory",), model=""),
    Case("model-offline", ("org/no-such-model", "Hugging Face", "give a directory"),
         model="org/no-such-model", changes={"HF_HUB_OFFLINE": "1"}, own_process=True),
    Case("model-no-network", ("org/no-such-model", "Hugging Face", "give a directory"),
         model="org/no-such-model", changes={"HF_ENDPOINT": "http://127.0.0.1:9"},
         own_process=True),
    # options
    Case("unknown-option", ("--max-token", "--max-tokens"), arguments=(*IDS, "--max-token", "3"),
         status=USAGE, own_process=True),
    Case("unknown-command", ("generat", "generate"), command="generat", status=USAGE),
    option("--threads", "0", "--threads", "from 1 to"),
    option("--cpu-actors", "99", "--cpu-actors", "from 1 to"),
    option("--context", str(10**9), "--context", f"to {MAX_POSITIONS}"),
    option("--mode", "xyz", "--mode", "dense", "exact", status=USAGE),
    option("--mode", "threshold", "never exactly zero", "this one's is relu of a gate"),
    option("--thresholds", "file", "go with --mode threshold, not with exact"),
    option("--exchange", "xyz", "--exchange", "arena", status=USAGE),
    option("--top-p", "7"),
    option("--temperature", "nan"),
    option("--temperature", "-1"),
    option("--seed", str(10**30)),
    option("--stop", ""),
    option("--stop", "x", "--stop", "no tokenizer"),
    option("--gpu-memory", "8GiB", "--gpu-memory", "leave it out"),
    option("--device", "cuda", "--device", "leave it out"),
    option("--cpu-memory", "lots", "--cpu-memory", "8GiB", status=USAGE),
    option("--cpu-memory", "9" * 400, "--cpu-memory", "8GiB", status=USAGE),
    # prompts
    Case("ids-no-numbers", ("a,b", "1,2,3"), arguments=("--prompt-ids", "a,b"), status=USAGE),
    Case("ids-none", ("empty", "at least one"), arguments=("--prompt-ids", "")),
    Case("id-too-large", (str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"),
         arguments=("--prompt-ids", f"1,{VOCAB_SIZE}")),
    Case("id-negative", ("-1", "vocabulary"), arguments=("--prompt-ids", "-1")),
    Case("both-prompts", ("--prompt", "--prompt-ids", "leave one out"), arguments=(*IDS, *TEXT)),
    Case("empty-prompt", ("empty",), add_tokenizer, arguments=("--prompt", "")),
    Case("stdin-empty", ("empty",), add_tokenizer, arguments=()),
    Case("stdin-closed", ("no prompt", "--prompt"), add_tokenizer, arguments=(), stdin=None,
         own_process=True),
    Case("stdin-bytes-kept", ("Unicode", "UTF-8"), add_tokenizer, arguments=(), stdin=b"\xff\xfew1",
         stdin_errors="surrogateescape"),
    Case("prompt-huge", ("5000000 characters", "shorten"), add_tokenizer, arguments=(),
         stdin="w1 w" * 1_250_000),
    Case("prompt-too-long", (f"{MAX_POSITIONS} tokens", "shorten it"),
         arguments=("--prompt-ids", ",".join(["1"] * MAX_POSITIONS))),
    Case("prompt-beyond-context", ("4 tokens", "--context"),
         arguments=("--prompt-ids", "1,2,3,4", "--context", "4")),
    Case("no-tokenizer", ("no tokenizer", "--prompt-ids"), arguments=TEXT),
    Case("tokenizer-damaged", ("tokenizer.json", "download"), write("tokenizer.json", '{"model":'),
         arguments=TEXT),
    Case("no-template", ("no chat template", "plain prompt"), add_tokenizer, arguments=CHAT),
    Case("template-syntax", ("chat_template.jinja",), add_template("{% if %}"), arguments=CHAT),
    Case("template-escapes", ("chat_template.jinja", "unsafe"),
         add_template("{{ messages.__class__.__mro__ }}"), arguments=CHAT),
    Case("template-refuses", ("refuses", "no questions"),
         add_template("{{ raise_exception('no questions') }}"), arguments=CHAT),
    Case("chat-no-template", ("no tokenizer", "use generate"), command="chat", arguments=()),
    Case("template-huge", ("characters", "shorten"), add_template("{{ '%5000000d' % 1 }}"),
         arguments=CHAT),
    # Ray
    Case("ray-folder-a-file", ("Ray could not be started", "directory"),
         changes={"RAY_TMPDIR": "{model}/config.json"}, own_process=True),
    Case("ray-folder-too-long", ("path is too long", "RAY_TMPDIR"),
         changes={"RAY_TMPDIR": "{model}/" + "x" * 100}, own_process=True),
    Case("tensor-missing", ("layers.3.", "missing", "download"),
         change_config(num_hidden_layers=4)),
    # found only while services load
    Case("nan-weight", (UP.removeprefix("model."), "NaN", "download"), poison,
         own_process=True, starts_ray=True),
]  # fmt: skip


def execute(case: Case, good: Path, folder: Path) -> Outcome:
    model = folder / "model"
    shutil.copytree(good, model)
    case.damage(model)
    arguments = IDS if case.arguments is None else case.arguments
    line = case.command, case.model.format(model=model), *arguments
    if not case.own_process:
        assert case.stdin is not None and not case.changes
        return run_here(*line, stdin=case.stdin, stdin_errors=case.stdin_errors)
    changes = {name: value.format(model=model) for name, value in case.changes.items()}
    return run(*line, stdin=case.stdin, changes={"HF_HOME": str(folder)} | changes)


@pytest.mark.sweep(keep=24)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_bad_input_is_one_line_and_a_status(case: Case, good: Path, tmp_path: Path) -> None:
    outcome = execute(case, good, tmp_path)
    assert len(outcome.error_lines) == 1, outcome.err
    line = outcome.error_lines[0]
    assert line.startswith("hotcold: error: ")
    for word in case.says:
        assert word in line
    assert len(line) < 800
    assert "Traceback" not in outcome.err
    assert outcome.status == case.status
    assert outcome.out == ""
    assert outcome.started_ray == case.starts_ray
    assert outcome.left == []
    assert not (tmp_path / "model" / "executed").exists()  # by a pickle


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(good: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(good, model)
    (model / WEIGHTS).chmod(0)
    outcome = run_here("generate", model, *IDS)
    assert outcome.error_lines == [
        f"hotcold: error: {model / WEIGHTS}: cannot be read (Permission denied)"
    ]
    assert outcome.status == FAILURE


def test_debug_adds_the_traceback(good: Path) -> None:
    outcome = run_here("generate", good, "--prompt-ids", "-1", "--debug")
    assert outcome.error_lines[0].startswith("Traceback")
    assert outcome.error_lines[-1].startswith("hotcold: error: token id -1")
    assert outcome.status == FAILURE
