"""Answers held to a regex, and what is told of one that cannot be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hotcold.actors.driver.grammars.masks import Grammars
from hotcold.actors.driver.thoughts import Thoughts
from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.chat_template import Thinking
from hotcold.model.text.tokenizer import Tokenizer


@pytest.mark.parametrize("thoughts", [None, Thoughts(Thinking("<a>", "</a>"), are_open=True)])
def test_a_regex_matches_what_python_takes_for_it(thoughts: Thoughts | None) -> None:
    """The whole answer, and the end there alone."""
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    end = 0
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [end])
    for pattern, text in (("a/b\\/\n[cd]+", "a/b/\ncdc"), (r'"\w{2}"', '"é_"'), ("[/\\\\]", "\\")):
        assert re.fullmatch(pattern, text)
        constraint = grammars.constraint(Grammar("regex", pattern), thoughts)
        if thoughts is not None:
            constraint.resume("")
        for token in [*tokenizer.encode(text, False), end]:
            masked = constraint.masked(np.zeros(tokenizer.vocab_size, np.float32))
            assert masked[token] == 0
            constraint.accept(token)


@pytest.mark.parametrize(
    ("pattern", "text", "others"),
    [
        (r"\d+", "7", "\U0001fbf8٣é"),
        (r"[x\d]", "7", "\U0001fbf8٣é"),
        (r"\w", "é", "\U0001e900\U0001fbf8-"),
        (r"[\w-]", "-", "\U0001e900\U0001fbf8."),
        (r"\\d", "\\", "7"),
        (r"\[\d", "[", "7"),
        (r"[^\d]", "x", "7\U0001fbf8"),
        (r"[^]\w]", "-", "]é\U0001e900"),
    ],
)
def test_classes_of_a_regex_mean_usual_characters(pattern: str, text: str, others: str) -> None:
    """A text that begins an answer matches in Python, too; none of `others` begins one."""
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [0])
    constraint = grammars.constraint(Grammar("regex", pattern))

    def begins(text: str) -> bool:
        ids = tokenizer.encode(text, False)
        return constraint.beginning(ids) == ids

    assert begins(text) and not any(map(begins, others))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(ab)/(c", "the regex '(ab)/(c' cannot be used: unclosed group, at '(c'"),
        ("a/\n[b-", r"the regex 'a/\n[b-' cannot be used: unclosed character class, at '[b-'"),
        ("é/x{2,1}", r"the regex '\xe9/x{2,1}' cannot be used: invalid repetition count range, "),
        (
            r"(a)\1",
            r"the regex '(a)\\1' cannot be used: backreferences are not supported, at '\\1'",
        ),
        (r"\bfoo", r"the regex '\\bfoo' cannot be used: lookarounds not supported"),
        ("a\\", r"the regex 'a\\' cannot be used: a backslash ends it"),
    ],
)
def test_a_wrong_regex_is_told_as_it_was_given(pattern: str, told: str) -> None:
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    with pytest.raises(UsageError) as error:
        Grammars(tokenizer, tokenizer.vocab_size, [0]).constraint(Grammar("regex", pattern))
    assert str(error.value).startswith(told)
