"""Each benchmark runs: it says what it does, and those that take seconds do it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from hotcold.model.config.build import build_config
from hotcold.model.synthetic.shape import SHAPES, config_json
from tests.benchmark_programs import ROOT, output_of, run_benchmark, run_in_own_process

PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Stands in for llama.cpp's: as fast as it is told.
LLAMA_BENCH = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a log, {{ and no JSON")
for length in [*filter(int, options["-p"].split(",")), 0]:
    tokens = 0 if length else int(options["-n"])
    print(json.dumps({{"n_prompt": length, "n_gen": tokens, "samples_ts": [50.0]}}))
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_says_what_it_does(name: str) -> None:
    assert "Usage:" in output_of(run_benchmark(name, "--help"))


def test_lines_are_counted_by_room() -> None:
    counts = {line.split()[1]: int(line.split()[0]) for line in
              output_of(run_benchmark("lines")).splitlines()}  # fmt: skip
    assert counts["library"] > counts["actors"] > 0
    assert counts["all"] > counts["library"] + counts["tests"]


def test_what_stands_in_for_a_model_reads_as_many_bytes(tmp_path: Path) -> None:
    """Its head, too, whose rows are no whole blocks of 256."""
    from benchmarks.random_gguf import write_like  # torch

    shape = replace(SHAPES["tiny"], hidden=576, layers=2)
    write_like(tmp_path / "m.gguf", build_config(config_json(shape, "float16")), "q4_0")
    found = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert {one.tensor_type.name for one in found if len(one.shape) > 1} == {"Q4_0"}


def test_a_random_file_beside_llama_cpp(tmp_path: Path) -> None:
    file, bench, out = (tmp_path / name for name in ("tiny.gguf", "llama-bench", "report.md"))
    output_of(
        run_benchmark("random_gguf", file, "--shape", "tiny", "--format", "f16", "--layers", 2)
    )
    bench.write_text(LLAMA_BENCH)
    bench.chmod(0o755)
    sizes = ["--mode", "dense", "--tokens", 4, "--prompt-tokens", 40, "--rounds", 1]
    asked = [file, *sizes, "--llama-bench", bench, "--json", "--out", out]
    report = json.loads(output_of(run_in_own_process("vs_llama_cpp", *asked)))
    row = report["rows"][0]
    assert (row["format"], row["mode"], row["what"]) == ("as stored", "dense", "decode")
    assert row["llama_cpp"] == [50.0]
    assert row["ratios"] == [ours / 50 for ours in row["hotcold"]]
    assert "| as stored | `dense` | prompt of 40 | 50.00 (" in out.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("faults", "--faults 4 --context 512"),
        ("fleet_faults", "--minutes 0.2 --clients 2 --requests 20"),
        ("fleet_overhead", "--rounds 1 --tokens 8 --conversations 4"),
        ("random_requests", "--requests 60 --context 256"),
        ("prefixes_and_drafts", "--tokens 8 --rounds 1 --turns 2 --part tools --part drafts"),
        ("start", "--runs 1 --way serve --seconds 1"),
    ],
)
def test_a_small_run(name: str, arguments: str) -> None:
    report = json.loads(output_of(run_in_own_process(name, *arguments.split(), "--json")))
    assert report["machine"] and not report.get("wrong")
