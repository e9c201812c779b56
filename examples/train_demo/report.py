"""The demo model's report, REPORT.md: what the model can do, measured by hotcold itself.

Answers:   all questions, asked through the chat template, greedy; right only if the whole reply is
           the docstring's first sentence, word for word.
Sparsity:  share of neurons whose relu(gate) is exactly zero, by tokens of heldout.txt.
Skew:      share of neurons that make 80% of all activations, and a histogram of firing rates.
"""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from examples.train_demo.corpus import questions, stdlib_entries
from hotcold import LLM, SamplingParams
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.sparsity import hot_share
from hotcold.model.weights.sizes import num_parameters
from hotcold.placement.profile import read_profile

MAX_ANSWER_TOKENS = 96
RATE_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0)


def write_report(model_dir: Path, training: dict[str, object] | None) -> None:
    """Measure the model in `model_dir`; None keeps what its report says of the training."""
    path, config = model_dir / "REPORT.md", read_config(model_dir)
    trained = section("Training", () if training is None else training.items()).strip()
    if training is None and path.exists():
        _, heading, kept = path.read_text("utf-8").partition("## Training\n")
        trained = (heading + kept.split("\n## ")[0]).strip() or trained
    with LLM(model_dir, own=True) as llm:
        num_asked, wrong = ask_all(llm)
        held_out = read_held_out(llm, (model_dir / "heldout.txt").read_text("utf-8"))
    rates = firing_rates(model_dir, config)
    shares = [(number, f"{1 - rate.mean():.1%}", f"{hot_share(rate):.1%}")
              for number, rate in enumerate(rates)]  # fmt: skip
    lines = [
        "# The demo model: what it can do\n",
        "Written by `python -m examples.train_demo`; recomputed by `--evaluate demo`. All figures"
        " are of the float16 weights in this folder.\n",
        f"- It answers **{num_asked - len(wrong):,} of {num_asked:,}** questions about Python's"
        " docstrings with the docstring's first sentence, word for word (greedy decoding).",
        f"- On held-out text **{1 - rates.mean():.1%}** of its gate activations are exactly zero.",
        f"- **{hot_share(rates.flatten()):.1%}** of the neurons make 80% of the activations on"
        " held-out text.",
        f"- {held_out}\n",
        f"{trained}\n",
        section("Model", shape_of(model_dir, config).items()),
        section("Each layer on held-out text", shares,
                ("layer", "zero activations", "neurons that make 80%")),
        section("Firing rates on held-out text, all layers", histogram(rates),
                ("tokens it fires for", "neurons")),
        section("Wrong answers", wrong, ("question", "expected", "given")),
    ]  # fmt: skip
    path.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def ask_all(llm: LLM) -> tuple[int, list[tuple[str, str, str]]]:
    """The number of questions, and those answered wrongly, with the answers wanted and given."""
    asked = questions(stdlib_entries())
    conversations = [[{"role": "user", "content": one.canonical}] for one in asked]
    params = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    given = [result.text for result in llm.chat(conversations, params)]
    rows = zip(asked, given, strict=True)
    return len(asked), [(one.canonical, one.answer, text) for one, text in rows
                        if text != one.answer]  # fmt: skip


def read_held_out(llm: LLM, text: str) -> str:
    """Perplexity over windows of the context, each opened by the bos token, in a sentence."""
    ids, opening = llm.tokenize(text, add_special_tokens=False), llm.tokenize("")
    size = llm.context_length - len(opening) - 1
    windows = [[*opening, *ids[first : first + size]] for first in range(0, len(ids), size)]
    nats = -sum(scored.logprob for scored in llm.score(windows))
    bits_a_byte = nats / len(text.encode()) / math.log(2)
    return (
        f"Held-out perplexity {math.exp(nats / len(ids)):.2f} a token over {len(ids):,} tokens"
        f" ({bits_a_byte:.3f} bits a byte)."
    )


def firing_rates(model_dir: Path, config: ModelConfig) -> np.ndarray:
    """Share of the held-out text's tokens for which each neuron fires: (layers, N)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile.safetensors")
        command = [sys.executable, "-m", "hotcold", "profile", str(model_dir), "--inputs", "0"]
        command += ["--text", str(model_dir / "heldout.txt"), "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = read_profile(file, ModelIdentity.of(model_dir), config)
    return found.counts / found.num_tokens


def histogram(rates: np.ndarray) -> list[tuple[str, int]]:
    """How many neurons of all layers fire how often."""
    rows = [("0", int((rates == 0).sum()))]
    for low, high in pairwise(RATE_EDGES):
        rows.append((f"{low:.1%} to {high:.1%}", int(((rates > low) & (rates <= high)).sum())))
    return rows


def shape_of(model_dir: Path, config: ModelConfig) -> dict[str, int]:
    """The model's shape and size."""
    return {
        "parameters": num_parameters(Checkpoint(model_dir), config),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "neurons_per_layer": config.ffn_size,
        "heads": config.num_heads,
        "key_value_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "weights_bytes": (model_dir / "model.safetensors").stat().st_size,
    }


def section(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ("", "")) -> str:
    """A heading and a table, or "None."."""
    table = [_row(header), _row(["---"] * len(header)), *map(_row, rows)]
    return "\n".join([f"## {title}", "", *(table if len(table) > 2 else ["None."]), ""])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
