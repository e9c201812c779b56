"""A Lark grammar without recursion as one regex, so that a string of JSON can be held to it."""

from __future__ import annotations

import ast
import re
from contextlib import suppress

_MAX_CHARS = 5000  # of the regex; llguidance takes long to read more
_STRING = r'"(?:\\.|[^"\\\n])*"'
# A rule's `?name` is told from an operator by the letter that follows, as in Lark.
_TOKEN = re.compile(
    r"\s+|//[^\n]*|\#[^\n]*|->\s*\w+"
    r"|%import\s+common\.(?P<imported>\w+)(?:\s*->\s*(?P<renamed>\w+))?"
    rf"|(?P<range>(?P<first>{_STRING})\s*\.\.\s*(?P<last>{_STRING}))|(?P<string>{_STRING}i?)"
    r"|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)"
    r"|(?P<name>!?[?]?[A-Za-z_]\w*(?:\.\d+)?)(?P<defined>\s*:)?"
    r"|(?P<count>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?)"
    r"|(?P<sign>[*+?])|(?P<open>[([])|(?P<close>[])])|(?P<bar>\|)",
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
_BRACKETS = {"(": "(?:", ")": ")", "[": "(?:(?:", "]": ")?)"}  # Lark's in a regex


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
        self._tokens: dict[str, list[re.Match[str]]] = {}
        self._found: dict[str, str | None] = {}  # None: it is being read
        at, tokens = 0, []
        while at < len(grammar):
            match = _TOKEN.match(grammar, at)
            if match is None:
                raise _NoRegexError
            at = match.end()
            if match["imported"]:
                name = match["renamed"] or match["imported"]
                self._found[name] = _group(_COMMON.get(match["imported"], ""))
            elif match["defined"]:
                tokens = self._tokens.setdefault(_plain(match["name"]), [])
            elif match.lastgroup:
                tokens.append(match)

    def regex(self, name: str) -> str:
        """The regex of a rule."""
        if name not in self._found:
            self._found[name] = None
            self._found[name] = _group(self._translated(self._tokens.get(name, [])))
        found = self._found[name]
        if not found:
            raise _NoRegexError
        return found

    def _translated(self, tokens: list[re.Match[str]]) -> str:
        """What a rule is: the two languages differ in how they write one thing alone."""
        found, opened, may_repeat = "", list[str](), False
        for token in tokens:
            kind, text = str(token.lastgroup), token[0]
            if kind in ("sign", "count") and not may_repeat:
                raise _NoRegexError
            may_repeat = kind not in ("sign", "count", "open", "bar")
            match kind:
                case "name":
                    text = self.regex(_plain(text))
                case "regex":
                    text = _of_regex(text)
                case "string":
                    text = f"(?:{_of_string(text)})"
                case "range":
                    text = f"[{_of_string(token['first'])}-{_of_string(token['last'])}]"
                case "count":
                    text = f"{{{token['least']},{token['most'] or token['least']}}}"
                case "open":
                    opened.append(text)
                    text = _BRACKETS[text]
                case "close":
                    if not opened or opened.pop() + text not in ("()", "[]"):
                        raise _NoRegexError
                    text = _BRACKETS[text]
            found = _short(found + text)
        if opened:
            raise _NoRegexError
        return found


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
