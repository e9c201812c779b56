"""`hotcold perplexity`, as a user runs it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from tests.e2e.commands import CHECKOUT, run_here, run_main
from tests.e2e.word_model import add_tokenizer
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MAX_POSITIONS, make_tiny

DEMO = CHECKOUT / "demo"
HELD_OUT = DEMO / "heldout.txt"
COMPARED = ("ppl_dense", "mean_kld", "kld_stderr", "same_top_p", "same_top_p_stderr")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose word i is token i, and whose tokenizer opens no text with bos."""
    model = make_tiny("llama-gqa", tmp_path_factory.mktemp("words"))
    add_tokenizer(model)
    return model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Seventy words: tokens 0 to 69."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in range(70)))
    return path


def perplexity(model: Path, windows: list[list[int]]) -> float:
    """By transformers in float32, of each window's second half."""
    checkpoint = TinyCheckpoint(model)
    nll: list[float] = []
    for ids in windows:
        logits = checkpoint.logits_of(ids).astype(np.float64)
        log_p, first = log_softmax(logits, axis=-1), len(ids) // 2
        nll += [-log_p[at, ids[at + 1]] for at in range(first, len(ids) - 1)]
    return math.exp(np.mean(nll))


def test_the_demo_model(local_ray: None) -> None:
    """Windows cut as llama.cpp cuts them: the text opens with bos, and so does each window."""
    from transformers import PreTrainedTokenizerFast

    size = 128
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    ids = tokenizer(HELD_OUT.read_text("utf-8")[:10_000])["input_ids"]
    windows = [[1, *ids[1:size]], [1, *ids[size + 1 : 2 * size]]]
    assert ids[0] == 1 and ids[size] != 1
    done = run_main(
        "perplexity", "--text", HELD_OUT, "--mode", "exact", "--context-window", str(size),
        "--max-windows", "2", "--json",
    )  # fmt: skip
    found = done.report
    assert (
        done.out.startswith("ppl ") and " ± " in done.out and "recall" not in done.out.split("{")[0]
    )
    assert "same likeliest token 100.000% ± 0.000%" in done.out
    assert all(line.startswith("compiling kernels") for line in done.err.splitlines())
    # float16 weights are the same numbers in both, but the KV cache is float16 here.
    assert found["ppl"] == pytest.approx(perplexity(DEMO, windows), rel=1e-3)
    assert found["ppl_dense"] == pytest.approx(found["ppl"], rel=1e-5)
    assert (found["tokens"], found["windows"]) == (2 * (size // 2 - 1), 2)
    assert found["context_window"] == size and found["mode"] == "exact"
    assert 0 < found["ppl_stderr"] < found["ppl"]
    assert abs(found["mean_kld"]) < 1e-6 and 0 <= found["kld_stderr"] < 1e-6
    assert found["same_top_p"] > 0.99
    assert 0 < found["neurons_computed"] < 0.5
    assert found["recall"] is None and found["precision"] is None
    assert found["tokens_per_s"] > 0


def test_dense_is_compared_with_nothing(local_ray: None, words: Path, text: Path) -> None:
    """Without bos, windows are the text's own ids; what fills no window is left out."""
    line: list[str | Path] = ["perplexity", words, "--text", text, "--context-window", "32"]
    windows = [list(range(32)), list(range(32, 64))]
    done = run_main(*line, "--mode", "dense", "--json")
    found, expected = done.report, perplexity(words, windows)
    assert found["ppl"] == pytest.approx(expected, rel=1e-4)
    assert all(found[name] is None for name in COMPARED)
    assert found["neurons_computed"] == 1 and found["tokens"] == 30
    assert len(done.out.splitlines()) == 3
    line += ["--no-recall", "--exchange", "calls", "--cpu-actors", "2", "--threads", "2"]
    fast = run_main(*line, "--json").report
    assert fast["ppl"] == pytest.approx(expected, rel=1e-4)
    assert abs(fast["mean_kld"]) < 1e-9 and fast["same_top_p"] == 1
    assert fast["neurons_computed"] is None


def test_a_text_shorter_than_a_window(local_ray: None, words: Path, text: Path) -> None:
    done = run_main("perplexity", words, "--text", text, "--json")
    found = done.report
    assert done.err.strip() == (
        f"the text has 70 tokens, fewer than a window of {MAX_POSITIONS}: one window of 70"
    )
    assert found["ppl"] == pytest.approx(perplexity(words, [list(range(70))]), rel=1e-4)
    assert (found["windows"], found["context_window"], found["tokens"]) == (1, 70, 34)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--text nowhere.txt", "nowhere.txt: "),
        ("--text {short}", "has 31 tokens, too few to score"),
        ("--text {empty}", "empty"),
        ("--text {text} --context-window 129",
         "--context-window is 129; give a number from 32 to 128"),
        ("--text {text} --context-window 64 --context 63",
         "--context is 63, less than a window of 64 tokens"),
        ("--text {text} --context-window 64 --cpu-memory 10MB", "of memory"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(arguments: str, says: str, words: Path, text: Path) -> None:
    short, empty = text.with_name("short.txt"), text.with_name("empty.txt")
    short.write_text(" ".join(["w2"] * 31))
    empty.write_text("")
    line = arguments.format(text=text, short=short, empty=empty).split()
    assert says in run_here("perplexity", words, *line).refusal


def test_a_model_without_tokenizer(tmp_path: Path, text: Path) -> None:
    model = make_tiny("llama-gqa", tmp_path / "model")
    assert "tokenizer" in run_here("perplexity", model, "--text", text).refusal
