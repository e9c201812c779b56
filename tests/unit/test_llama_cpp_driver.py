"""llama.cpp's programs are called with the right options, and what they print is understood."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_programs import error_of, output_of, run_benchmark, run_in_own_process

# Prints a row for each run asked for; notes how it was called.
BENCH = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
print("no JSON")
print("{ no JSON either")
rows = [{"n_prompt": int(length), "n_gen": 0, "samples_ts": [SPEED * 10], "build_commit": "abc"}
        for length in options["-p"].split(",") if int(length)]
rows += [{"n_prompt": 0, "n_gen": int(options["-n"]), "samples_ts": [SPEED], "build_commit": "abc"}]
print(json.dumps(rows, indent=2))
"""
# Loses its first line, as llama-batched-bench's log does now and then.
BATCHED = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
lost = 1 if len(open(__file__ + ".calls").readlines()) == 1 else 0
for batch in options["-npl"].split(",")[lost:]:
    print(json.dumps({"pl": int(batch), "speed_tg": SPEED * int(batch)}))
"""
FAILING = "import sys\nsys.exit('one\\nlast words')\n"
LLAMA_CPP = """
__version__ = "1.2.3"

def llama_print_system_info():
    return b"CPU : AVX = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | "

class Llama:
    def __init__(self, model, n_ctx, n_batch, n_threads, n_threads_batch, verbose):
        self.room = n_ctx
        self.used = 0
        print([model, n_ctx, n_threads])

    def reset(self):
        self.used = 0
        print("reset")

    def eval(self, ids):
        self.used += len(ids)
        assert self.used <= self.room
        print("eval", len(ids))
"""

# The C interface, as far as batches take it; a decode of n tokens prints what they are.
LLAMA_CPP_BATCHES = """
from types import SimpleNamespace

llama_backend_init = llama_synchronize = lambda *given: None
llama_model_default_params = llama_context_default_params = lambda: SimpleNamespace()
llama_model_load_from_file = lambda path, params: path
llama_get_memory = lambda context: context
llama_memory_clear = lambda memory, data: print("clear")

def llama_init_from_model(model, params):
    print("context", params.n_ctx, params.n_seq_max, params.n_threads)
    return params

def llama_batch_init(most, embeddings, sequences):
    cells = [[0] for _ in range(most)]
    return SimpleNamespace(token=[0] * most, pos=[0] * most, n_seq_id=[0] * most, seq_id=cells,
                           logits=[0] * most, n_tokens=0)

def llama_decode(context, batch):
    n = batch.n_tokens
    print("decode", batch.pos[:n], [cell[0] for cell in batch.seq_id[:n]])
    return 0
"""


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def _build(folder: Path, speed: float, batched: bool = True) -> Path:
    if batched:
        text = BATCHED.replace("SPEED", str(speed))
        _program(folder / "bin" / "llama-batched-bench", text)
    return _program(folder / "bin" / "llama-bench", BENCH.replace("SPEED", str(speed)))


def _calls(program: Path) -> list[dict[str, str]]:
    lines = Path(f"{program}.calls").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [dict(zip_longest(call[0::2], call[1::2])) for call in found]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").touch()
    return tmp_path / "model.gguf"


def test_every_build_is_measured_by_itself(gguf_file: Path, tmp_path: Path) -> None:
    fast, slow = _build(tmp_path / "fast", 20.0), _build(tmp_path / "slow", 10.0)
    builds = ["--llama-bench", fast, "--llama-bench", slow]
    sizes = ["--threads", 3, "--tokens", 40, "--batch", 2, "--batch", 4]
    prompts = ["--prompt-tokens", 128, "--prompt-tokens", 512]
    lines = output_of(run_benchmark("llama_cpp", gguf_file, *builds, *sizes, *prompts)).splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [each["name"] for each in found] == ["fast", "slow"]
    assert [each["decode"] for each in found] == [20.0, 10.0]
    assert [each["instructions"] for each in found] == ["", ""]  # they do not say
    assert found[1]["prefill"] == {
        "128": {"tokens_per_s": 100.0, "first_token_s": 1.28},
        "512": {"tokens_per_s": 100.0, "first_token_s": 5.12},
    }
    assert found[0]["batch"] == {"2": 40.0, "4": 80.0}
    assert all(each["load_s"] > 0 for each in found)
    load, run = _calls(fast)
    assert load["-n"] == "1" and load["-p"] == "0" and "--no-warmup" in load
    expected = {"-m": str(gguf_file), "-t": "3", "-p": "128,512", "-n": "40", "-r": "1"}
    assert run == expected | {"-o": "json"}
    first, again = _calls(fast.with_name("llama-batched-bench"))
    assert (first["-npl"], first["-ntg"], first["-t"]) == ("2,4", "40", "3")
    assert int(first["-c"]) >= 4 * (40 + int(first["-npp"]))
    assert again["-npl"] == "2"


def test_a_lone_llama_bench_decodes_no_batches(gguf_file: Path, tmp_path: Path) -> None:
    program = _build(tmp_path / "one", 1.0, batched=False)
    found = json.loads(output_of(run_benchmark("llama_cpp", gguf_file, "--llama-bench", program)))
    assert found["batch"] == {}
    text = error_of(run_benchmark("llama_cpp", gguf_file, "--llama-bench", program, "--batch", 4))
    assert "llama-batched-bench beside llama-bench" in text


def test_errors_take_a_line(gguf_file: Path, tmp_path: Path) -> None:
    program = _program(tmp_path / "bin" / "llama-bench", FAILING)
    assert error_of(run_benchmark("llama_cpp", gguf_file, "--llama-bench", program)).endswith(
        ": last words"
    )
    missing = tmp_path / "nothing"
    text = error_of(run_benchmark("llama_cpp", gguf_file, "--llama-bench", missing))
    assert text.endswith(f"{missing} is no program; give the path of a llama-bench")
    if find_spec("llama_cpp") is None:
        assert "give --llama-bench" in error_of(run_benchmark("llama_cpp", gguf_file))


def test_llama_cpp_python_stands_in(gguf_file: Path, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "llama_cpp.py").write_text(LLAMA_CPP)
    run = ["--threads", 2, "--tokens", 3, "--prompt-tokens", 16]
    found = json.loads(output_of(run_in_own_process("llama_cpp", gguf_file, *run, modules=modules)))
    assert (found["name"], found["build"]) == ("llama-cpp-python", "1.2.3")
    assert found["instructions"] == "AVX, AVX2"
    assert found["decode"] > 0 and list(found["prefill"]) == ["16"]
    direct = ["-m", "some.gguf", "-t", 2, "-p", "16,0", "-n", 3, "-r", 2, "-o", "json"]
    said = output_of(
        run_in_own_process("llama_python", *direct, "--no-warmup", modules=modules)
    ).splitlines()
    assert said[0] == "['some.gguf', 16, 2]"
    rows = [json.loads(line) for line in said if line.startswith("{")]
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(16, 0), (0, 3)]
    assert all(len(row["samples_ts"]) == 2 for row in rows)
    steps = [line for line in said if line.startswith(("reset", "eval"))]
    one_by_one = ["reset", "eval 1", "eval 1", "eval 1"]
    assert steps == ["reset", "eval 16"] * 2 + one_by_one * 2


def test_llama_cpp_python_decodes_batches(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP_BATCHES)
    sizes = ["-m", "some.gguf", "-t", 2, "-c", 64, "-npp", 1, "-ntg", 3, "-npl", "2,3"]
    lines = output_of(run_in_own_process("llama_python_batches", *sizes, modules=tmp_path))
    said = lines.splitlines()
    rows = [json.loads(line) for line in said if line.startswith("{")]
    assert [row["pl"] for row in rows] == [2, 3] and all(row["speed_tg"] > 0 for row in rows)
    assert said[0] == "context 64 3 2"
    first = said.index("clear", 2)  # after what warms up
    assert said[first + 1 : first + 5] == [f"decode [{at}, {at}] [0, 1]" for at in range(4)]
