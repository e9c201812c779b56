"""The table of the comparison says what its report says, and a whole run makes such a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.synthetic.make import make_model
from hotcold.model.synthetic.shape import SyntheticShape
from tests.benchmark_programs import (
    error_of,
    output_of,
    rows_of,
    run_benchmark,
    run_in_own_process,
    table_of,
)
from tests.unit.test_llama_cpp_driver import _build

ROUND_OF_HOTCOLD = """
from hotcold.actors.protocol.messages import Generation
from benchmarks.hotcold_side import batch_report
results = [Generation("", [0] * 11, "length", 2, prefill_s=0.5, decode_s=5.0, step_tokens=3.0),
           Generation("", [0] * 11, "length", 2, prefill_s=0.5, decode_s=10.0, queued_s=1.0,
                      step_tokens=1.5)]
report = batch_report(results)
"""


def _ours(tokens_per_s: float, gates: float, batch: float, peak: float) -> dict[str, Any]:
    return {
        "tokens_per_s": tokens_per_s,
        "gates_computed": gates,
        "density": 0.1,
        "bytes_per_token": 2.5e9,
        "gb_per_s": 40.0,
        "read_gb_per_s": 50.0,
        "per_token_ms": {"ffn": 3.0, "total": 4.0},
        "batch": {"4": {"tokens_per_s": batch, "slowest_share": batch / 200}},
        "prefill": {"128": {"tokens_per_s": 130.0, "first_token_s": 0.5}},
        "peak_bytes": peak,
        "resident_bytes": 1e9,
    }


def _theirs(name: str, decode: float, batch: dict[str, float], first: float) -> dict[str, Any]:
    prefill = {"128": {"tokens_per_s": 100.0, "first_token_s": first}}
    both = {"name": name, "build": "abc", "decode": decode, "prefill": prefill}
    return both | {"batch": batch, "peak_bytes": 4e9}


def _round(theirs: float, exact: float, sign: float) -> dict[str, Any]:
    return {
        "llama_cpp": [
            _theirs("native", theirs, {}, 2.0),
            _theirs("portable", theirs / 2, {"4": 50.0}, 1.0),
        ],
        "hotcold": {
            "exact": _ours(exact, 1.0, 100.0, 5e9),
            "sign": _ours(sign, 0.25, 150.0, 2e9),
        },
    }


def _format(dtype: str, **more: Any) -> dict[str, Any]:
    runs = [_round(10, 20, 30), _round(20, 30, 100), _round(40, 100, 40)]
    return {"dtype": dtype, "likeness": "its like", "loads": [], "recall": {}, "runs": runs} | more


REPORT = {
    "modes": ["exact", "sign"],
    "tokens": 64,
    "prompt_tokens": [128],
    "batches": [4],
    "rounds": 3,
    "one_at_a_time": False,
}


def test_rows_have_ratios_of_each_round_and_the_better_build(tmp_path: Path) -> None:
    loads = [{"llama_cpp": [2.0, 1.0], "hotcold": 4.0}, {"llama_cpp": [2.0, 0.5], "hotcold": 1.0}]
    recall = {"by_layer": [0.5, None, 0.9], "tokens": 128, "distinct_tokens": 7}
    formats = [_format("f16", loads=loads, recall={"sign": recall}), _format("q8")]
    table = table_of("vs_llama_cpp", REPORT | {"formats": formats}, tmp_path)
    rows = rows_of(table)
    assert [row[0] for row in rows] == ["f16"] * 9 + ["q8"] * 8
    assert [row[1:] for row in rows[:9]] == [
        ["decode of 64 tokens, `exact`, tokens/s", "20.00", "30.00", "2.00 (1.50 to 2.50)",
         "100.0%", "10.0%", "2.50"],
        ["decode of 64 tokens, `sign`, tokens/s", "20.00", "40.00", "3.00 (1.00 to 5.00)", "25.0%",
         "10.0%", "2.50"],
        ["decode of 4 requests at once, `exact`, tokens/s in all", "50.00", "100.00",
         "2.00 (2.00 to 2.00)", "", "", ""],
        ["decode of 4 requests at once, `sign`, tokens/s in all", "50.00", "150.00",
         "3.00 (3.00 to 3.00)", "", "", ""],
        ["prefill of 128 tokens, tokens/s", "100.00", "130.00", "1.30 (1.30 to 1.30)", "", "", ""],
        ["first token after 128, s", "1.00", "0.500", "2.00 (2.00 to 2.00)", "", "", ""],
        ["peak memory, `exact`, GB", "4.00", "5.00", "0.80 (0.80 to 0.80)", "", "", ""],
        ["peak memory, `sign`, GB", "4.00", "2.00", "2.00 (2.00 to 2.00)", "", "", ""],
        ["start of the program to its first token, `exact`, s", "0.750", "2.50",
         "0.38 (0.25 to 0.50)", "", "", ""],
    ]  # fmt: skip
    notes = table.splitlines()[-7:]
    assert "native (abc), portable (abc)" in notes[0] and "f16 native 5, portable 3" in notes[0]
    assert "f16: llama.cpp reads its like" in notes[1]
    assert "least layer" not in notes[2] and "50% of 4" in notes[2] and "(80%)" in notes[2]
    assert "50.00% in the least layer, 70.00% in the mean of all" in notes[3]
    assert "75% of 4" in notes[3] and "least layer" not in notes[6]


def test_the_table_says_which_instructions_either_side_had(tmp_path: Path) -> None:
    found = _format("q4")
    for run in found["runs"]:
        run["llama_cpp"][0]["instructions"] = "AVX2, FMA"
    limits = {"instructions": "kernels for avx2; torch for AVX2; oneDNN: AVX2"}
    table = table_of("vs_llama_cpp", REPORT | limits | {"formats": [found]}, tmp_path)
    assert "native (abc, compiled for AVX2, FMA), portable (abc);" in table
    assert "\n- hotcold: kernels for avx2; torch for AVX2; oneDNN: AVX2.\n" in table


def test_requests_of_a_batch_are_summed() -> None:
    names: dict[str, Any] = {}
    exec(ROUND_OF_HOTCOLD, names)
    report = names["report"]
    # From the second one on, 10 steps of 1.5 tokens in 10 s; each has 2 and 1 a second.
    assert report["tokens_per_s"] == pytest.approx(1.5)
    assert report["slowest_share"] == pytest.approx(1 / 1.5)


def test_mistakes_are_found_before_anything_runs(tmp_path: Path) -> None:
    make_model(tmp_path / "model", SyntheticShape("llama", 64, 96, 4, 4, 16, 64, 64, 1))
    bench = ["--llama-bench", _build(tmp_path / "build", 1.0), "--threads", 1]
    text = error_of(run_benchmark("vs_llama_cpp", tmp_path / "model", *bench, "--mode", "sign"))
    assert "hotcold train-predictors" in text
    assert "config.json" in error_of(run_benchmark("vs_llama_cpp", tmp_path, *bench))


@pytest.mark.thorough
@pytest.mark.timeout(600)  # kernels may have to be compiled
@pytest.mark.parametrize(("how", "rounds"), [([], 2), (["--one-at-a-time"], 1)])
def test_a_whole_run(how: list[str], rounds: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    make_model(tmp_path / "model", SyntheticShape("llama", 64, 96, 4, 4, 16, 64, 256, 2))
    bench: list[object] = ["--threads", 1]
    for name, speed in (("a", 1.0), ("b", 2.0)):
        bench += ["--llama-bench", _build(tmp_path / name, speed)]
    sizes = ["--rounds", rounds, "--load-rounds", 0, "--tokens", 8, "--batch", 2]
    sizes += ["--prompt-tokens", 40]
    out, kept = tmp_path / "results" / "out", tmp_path / "kept"
    files = ["--out", out, "--gguf-folder", kept]
    said = output_of(
        run_in_own_process("vs_llama_cpp", tmp_path / "model", *bench, *sizes, *files, *how)
    )
    assert said.strip() == out.with_name("out.md").read_text().strip()
    assert [path.name for path in kept.iterdir()] == ["model-f16.gguf"]
    report = json.loads(out.with_name("out.json").read_text())
    (found,) = report["formats"]
    assert len(found["runs"]) == rounds and report["one_at_a_time"] == bool(how)
    for run in found["runs"]:
        assert [each["decode"] for each in run["llama_cpp"]] == [1.0, 2.0]
        exact = run["hotcold"]["exact"]
        assert exact["density"] < 0.5 and exact["gates_computed"] == 1.0
        assert list(exact["prefill"]) == ["40"]
        assert len(exact["batch"]["2"]["requests_tokens_per_s"]) == 2
        assert exact["peak_bytes"] > 1e8
    assert report["instructions"] in said
    assert len(rows_of(said)) == 5
