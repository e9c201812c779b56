"""Which patterns of tokenizers are quick, and where texts are encoded by those that may not be."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from hotcold.actors.driver.prompts import Prompts
from hotcold.model.config.build import read_config
from hotcold.model.errors import ConfigError, PromptError, ServiceError
from hotcold.model.text.split_patterns import is_linear
from hotcold.model.text.splittings import SPLITTINGS
from hotcold.model.text.tokenizer import Tokenizer
from tests.tiny_models import make_tiny

# Whose patterns have alternatives that a text may be cut by in many ways.
_NOT_QUICK = ("tiny_aya", "cohere2moe", "exaone-moe")
_MOST_S = 2.0  # of the processor's time; what grows faster takes minutes
USUAL = {
    **{
        pattern: pattern
        for name, one in SPLITTINGS.items()
        if name not in _NOT_QUICK
        for pattern in (*one.patterns, *one.letter_patterns)
    },
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
}
SLOW = (
    r"(a+)+$", r"(a|aa)+[bc]", r"a*a*a*b", r"a+b", r"a+?b", r"\s+$", r"(?:a?){30}a{30}",
    "a?" * 30 + "a" * 30, "(a|aa)" * 30 + "b", r"(a)\1", r"\s*[\r\n]+", r"\p{L}+\p{L}+!",
    r"\p{N}{1,3}+x", r"(?:a|b)*c", r"(?<=a+)b", r"a\g<0>?b", "[a", "(", "a" * 5000,
)  # fmt: skip


def splitting(pattern: str) -> tokenizers.Tokenizer:
    vocab = {"a": 0, "b": 1, "x": 2}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="x"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return made


@pytest.mark.parametrize("name", _NOT_QUICK)
def test_others_are_known_not_to_be(name: str) -> None:
    """Their texts become ids in a process that can be ended."""
    one = SPLITTINGS[name]
    assert not all(map(is_linear, (*one.patterns, *one.letter_patterns)))


@pytest.mark.parametrize("name", USUAL)
def test_usual_ones_are_quick(name: str) -> None:
    assert is_linear(USUAL[name])
    tokenizer = splitting(USUAL[name])
    for part in ("a", "A", "é", "中", "1", " ", "\n", "\t", "!", "'", " \n", "aA", "a ", "!\n"):
        text = part * (40_000 // len(part))
        began = time.thread_time()
        tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert time.thread_time() - began < _MOST_S, part


@pytest.mark.parametrize("pattern", SLOW)
def test_what_may_be_slow_is_told(pattern: str) -> None:
    assert not is_linear(pattern)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    """Of a model that splits by a hostile pattern."""
    model = make_tiny("llama-relu", tmp_path)
    splitting("(a+)+[bc]").save(str(model / "tokenizer.json"))
    return Prompts(model, read_config(model), 100_000)


def test_a_hostile_pattern_can_be_ended(prompts: Prompts) -> None:
    """By itself each of these words takes a tenth of a second, whether or not it is long."""
    unwanted, here = threading.Event(), psutil.Process()
    before = set(here.children())

    def leave() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for child in set(here.children()) - before:
                if child.cpu_times().user > 1.0 and not unwanted.is_set():
                    unwanted.set()
            time.sleep(0.01)
            if unwanted.is_set():
                return

    leaving = threading.Thread(target=leave)
    leaving.start()
    began = time.process_time()
    with pytest.raises(ServiceError, match="cancelled"):
        prompts.encode(("a" * 21 + "x") * 2000, True, unwanted)
    leaving.join()
    assert time.process_time() - began < 10  # of this process: the work was another's
    assert prompts.encode("abx") == [0, 1, 2]


def test_a_panic_of_the_library_is_an_error(prompts: Prompts) -> None:
    with pytest.raises(PromptError, match=r"cannot encode the prompt: .*retry-limit"):
        prompts.encode("a" * 40 + "x")
    assert prompts.tokenizer is not None
    with pytest.raises(PromptError, match=r"cannot encode the prompt: .*retry-limit"):
        prompts.tokenizer.encode("a" * 40 + "x")


def test_a_decoder_with_a_hostile_pattern_is_refused(tmp_path: Path) -> None:
    tokenizer = splitting(r"\p{L}+")
    tokenizer.decoder = decoders.Replace("a", "b")
    state: Any = json.loads(tokenizer.to_str())
    for pattern, is_slow in ((r"▁+", False), ("(a+)+$", True)):
        state["decoder"]["pattern"] = {"Regex": pattern}
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        if is_slow:
            with pytest.raises(ConfigError, match="may take for ever"):
                Tokenizer.from_model(tmp_path)
        else:
            found = Tokenizer.from_model(tmp_path)
            assert found is not None and found.is_linear
