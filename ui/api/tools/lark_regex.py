"""A Lark grammar without recursion as one regex, so that a string of JSON can be held to it."""

from __future__ import annotations

import ast
import re
from contextlib import suppress

_MAX_CHARS = 5000  # of the regex; llguidance takes long to read more
# A rule's `?name` is told from an operator by the letter that follows, as in Lark.
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|\#[^\n]*"""
    r"""|%import\s+common\.(?P<imported>\w+)(?:\s*->\s*(?P<renamed>\w+))?"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)"""
    r"""|(?P<name>!?[?]?[A-Za-z_]\w*(?:\.\d+)?)(?P<defined>\s*:)?|(?P<other>->|\.\.|\d+|[][()|*+?~])""",
    re.ASCII,
)
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*", "CR": r"\r", "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"', "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]", "LETTER": "[A-Za-z]", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?", "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]*)?", "UCASE_LETTER": "[A-Z]", "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
}  # fmt: skip
_ENDS = ("|", ")", "]")
Token = tuple[str, str]  # its kind, its text


class _NoRegexError(Exception):
    """The grammar is recursive, too long, or holds what is not read here."""


def regex_of(grammar: str) -> str | None:
    """The regex of what `start` matches; None where there is none, or none that is found here."""
    with suppress(_NoRegexError, RecursionError):
        return _Rules(grammar).regex("start")
    return None


class _Rules:
    """The rules and terminals of one grammar."""

    def __init__(self, grammar: str) -> None:
        self._tokens: dict[str, list[Token]] = {}
        self._found: dict[str, str | None] = {}  # None: it is being read
        at, tokens = 0, []
        while at < len(grammar):
            match = _TOKEN.match(grammar, at)
            if match is None:
                raise _NoRegexError
            at = match.end()
            kind = match.lastgroup or ""
            if match["imported"]:
                name = match["renamed"] or match["imported"]
                self._found[name] = _group(_COMMON.get(match["imported"], ""))
            elif kind == "defined":
                tokens = self._tokens.setdefault(_plain(match["name"]), [])
            elif kind:
                tokens.append((kind, match[kind]))

    def regex(self, name: str) -> str:
        """The regex of a rule."""
        if name not in self._found:
            self._found[name] = None
            reader = _Reader(self, self._tokens.get(name, []))
            self._found[name] = _group(reader.alternatives())
            if not reader.has_ended:
                raise _NoRegexError
        found = self._found[name]
        if not found:
            raise _NoRegexError
        return found


class _Reader:
    """Reads what one rule is."""

    def __init__(self, rules: _Rules, tokens: list[Token]) -> None:
        self._rules = rules
        self._tokens = tokens
        self._at = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._tokens)

    def alternatives(self) -> str:
        """The regex of sequences with | between them."""
        found = self._sequence()
        while self._takes("|"):
            found = _short(f"{found}|{self._sequence()}")
        return found

    def _sequence(self) -> str:
        found = ""
        while not self.has_ended and self._tokens[self._at][1] not in _ENDS:
            if self._takes("->"):
                self._next()
            else:
                found = _short(found + self._repeated(self._single()))
        return found

    def _single(self) -> str:
        kind, text = self._next()
        if kind == "name":
            return self._rules.regex(_plain(text))
        if kind == "regex":
            return _of_regex(text)
        if kind == "string":
            if self._takes(".."):
                return f"[{_of_string(text)}-{_of_string(self._next()[1])}]"
            return _group(_of_string(text))
        if text not in ("(", "["):
            raise _NoRegexError
        inner = _group(self.alternatives())
        if not self._takes(")" if text == "(" else "]"):
            raise _NoRegexError
        return inner if text == "(" else f"{inner}?"

    def _repeated(self, one: str) -> str:
        for sign in "*+?":
            if self._takes(sign):
                return _group(one + sign)
        if not self._takes("~"):
            return one
        least = most = self._next()[1]
        if self._takes(".."):
            most = self._next()[1]
        return _group(f"{one}{{{least},{most}}}")

    def _takes(self, text: str) -> bool:
        is_next = not self.has_ended and self._tokens[self._at] == ("other", text)
        self._at += is_next
        return is_next

    def _next(self) -> Token:
        if self.has_ended:
            raise _NoRegexError
        self._at += 1
        return self._tokens[self._at - 1]


def _plain(name: str) -> str:
    """A rule's name without marks and priority."""
    return name.lstrip("!?").partition(".")[0]


def _short(regex: str) -> str:
    """The same. Errors: _NoRegexError for one that is too long."""
    if len(regex) > _MAX_CHARS:
        raise _NoRegexError
    return regex


def _group(regex: str) -> str:
    return f"(?:{_short(regex)})" if regex else ""


def _of_string(text: str) -> str:
    body = text.removesuffix("i")
    try:
        found = re.sub(r"[][\\^$.|?*+(){}&~#-]", r"\\\g<0>", str(ast.literal_eval(body)))
    except (SyntaxError, ValueError):
        raise _NoRegexError from None
    return found if body == text else f"(?i:{found})"


def _of_regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    return f"(?{flags.replace('l', '')}:{body})".replace(r"\/", "/")
