"""The demo model's corpus: what every Python carries, as questions and as running text.

The standard library's source files are parsed with `ast`, never imported. A few built-in modules
written in C are asked for their `__doc__` instead. The corpus depends on the Python version, so a
report of a training names it.

    entries = stdlib_entries()               every public docstring, with its dotted name
    questions(entries)                       "What does textwrap.dedent do?" and its answer
    running_text(entries)                    documents, each the docstrings of one module
    held_out_text(entries)                   the same of HELD_OUT_MODULES, which training never sees
"""

import ast
import importlib
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HELD_OUT_MODULES = _words(
    "tarfile mailbox fractions smtplib imaplib nntplib telnetlib cgi aifc wave sunau optparse"
    " mailcap pipes sched colorsys graphlib pstats xdrlib plistlib netrc symtable zipapp"
    " modulefinder chunk cgitb poplib socketserver filecmp"
)
SKIPPED_PACKAGES = _words(
    "test tests idlelib idle_test lib2to3 turtledemo site-packages ensurepip encodings"
    " pydoc_data __pycache__ distutils turtle"
)
BUILT_IN_MODULES = _words(
    "builtins math itertools time os collections functools operator datetime sys gc"
    " cmath array bisect heapq random zlib binascii select signal struct"
)
# Where people know an object that is defined in a submodule.
PUBLIC_NAMES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "unittest.case": "unittest",
    "unittest.suite": "unittest",
    "unittest.loader": "unittest",
    "unittest.result": "unittest",
    "unittest.runner": "unittest",
    "json.decoder": "json",
    "json.encoder": "json",
    "multiprocessing.context": "multiprocessing",
}
# Read as running text only: few people ask about these, and memory is finite.
NOT_ASKED_PACKAGES = _words(
    "tkinter ntpath macpath nturl2path sre_parse sre_compile sre_constants xmlrpc wsgiref pydoc bdb"
    " imghdr sndhdr smtpd asynchat asyncore crypt imp antigravity this stringprep"
)
ANSWER_CHARS = range(15, 201)
OTHER_QUESTIONS = (
    "What is {name} for?",
    "Explain {name}.",
    "Describe {name}.",
    "Tell me about {name}.",
    "what does {name} do",
)


@dataclass(frozen=True)
class Entry:
    """One docstring: of a module, a class, a function or a method."""

    module: str
    name: str
    docstring: str


@dataclass(frozen=True)
class Question:
    """What is asked about, and the first sentence of its docstring."""

    name: str
    answer: str

    @property
    def canonical(self) -> str:
        """The wording that the report's measure uses."""
        return f"What does {self.name} do?"

    def phrased(self, rng: random.Random) -> str:
        """That wording half of the time, else another."""
        if rng.random() < 0.5:
            return self.canonical
        return rng.choice(OTHER_QUESTIONS).format(name=self.name)


def stdlib_entries() -> list[Entry]:
    """Every public docstring of the standard library, sorted by module, each name once."""
    found: dict[str, Entry] = {}
    for module, path in _public_modules(Path(sysconfig.get_paths()["stdlib"])):
        for entry in parse_entries(module, path.read_text("utf-8", "replace")):
            found.setdefault(entry.name, entry)
    for module in sorted(BUILT_IN_MODULES):
        for entry in _inspect_entries(module):
            found.setdefault(entry.name, entry)
    return sorted(found.values(), key=lambda entry: (entry.module, entry.name))


def parse_entries(module: str, source: str) -> Iterator[Entry]:
    """The public docstrings in one module's source, without running it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    public = _public_name(module)
    yield from _with_docstring(module, module, tree)
    yield from _layer_state(module, public, tree.body, depth=0)


def questions(entries: Iterable[Entry]) -> list[Question]:
    """One question a name whose docstring opens with a sensible sentence; no answer twice."""
    by_answer: dict[str, Question] = {}
    for entry in sorted(entries, key=lambda entry: (entry.name.count("."), entry.name)):
        if entry.module in HELD_OUT_MODULES or entry.module.split(".")[0] in NOT_ASKED_PACKAGES:
            continue
        answer = first_sentence(entry.docstring)
        if answer is not None:
            by_answer.setdefault(answer.lower(), Question(entry.name, answer))
    return sorted(by_answer.values(), key=lambda question: question.name)


def first_sentence(docstring: str) -> str | None:
    """The docstring's first sentence on one line, or None where it has no sensible one."""
    paragraphs = docstring.strip().split("\n\n")
    if len(paragraphs) > 1 and re.match(r"[\w.]+\(.*->", paragraphs[0]):
        paragraphs.pop(0)  # a signature, as functions written in C have it
    paragraph = " ".join(paragraphs[0].split())
    match = re.match(r"(.+?[.!?])(?=\s+[A-Z(`'\"]|$)", paragraph)
    sentence = match.group(1) if match else paragraph
    sensible = (
        len(sentence) in ANSWER_CHARS
        and sentence.isascii()
        and re.match(r"[A-Z][A-Za-z'`-]*[ ,]", sentence) is not None
        and not re.search(r"->|>>>|::|\bTODO\b|\bXXX\b| = |[|<>{}]|:$", sentence)
    )
    return sentence if sensible else None


def running_text(entries: Iterable[Entry]) -> list[str]:
    """Documents to read: the docstrings of each training module in turn, and Python's topics."""
    training = (entry for entry in entries if entry.module not in HELD_OUT_MODULES)
    by_module = groupby(training, key=lambda entry: entry.module)
    documents = ["\n\n".join(map(_paragraphs, group)) for _, group in by_module]
    topics = importlib.import_module("pydoc_data.topics").topics
    return documents + [text.strip() for _, text in sorted(topics.items())]


def held_out_text(entries: Iterable[Entry]) -> str:
    """The docstrings of the modules that training never sees."""
    held_out = (_paragraphs(entry) for entry in entries if entry.module in HELD_OUT_MODULES)
    return "\n\n".join(held_out) + "\n"


def _paragraphs(entry: Entry) -> str:
    return f"{entry.name}\n\n{entry.docstring}"


def _public_modules(stdlib: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(stdlib.rglob("*.py")):
        parts = list(path.relative_to(stdlib).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if not parts or SKIPPED_PACKAGES.intersection(parts):
            continue
        if all(part.isidentifier() and not part.startswith("_") for part in parts):
            yield ".".join(parts), path


def _public_name(module: str) -> str:
    if module.startswith("asyncio."):
        return "asyncio"
    return PUBLIC_NAMES.get(module, module)


def _with_docstring(
    module: str, name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Entry]:
    docstring = ast.get_docstring(node)
    if docstring:
        yield Entry(module, name, docstring)


def _layer_state(module: str, prefix: str, body: list[ast.stmt], depth: int) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _layer_state(module, prefix, node.body, depth)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        yield from _with_docstring(module, name, node)
        if isinstance(node, ast.ClassDef) and depth < 1:
            yield from _layer_state(module, name, node.body, depth + 1)


def _inspect_entries(module: str) -> Iterator[Entry]:
    """Docstrings of a module written in C; a built-in is known by its bare name."""
    loaded = importlib.import_module(module)
    prefix = "" if module == "builtins" else f"{module}."
    for name, value in sorted(vars(loaded).items()):
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isbuiltin(value)):
            continue
        if inspect.isclass(value) and issubclass(value, Warning):
            continue
        yield from _of_object(module, prefix + name, value)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for method, member in sorted(vars(value).items()):
                if not method.startswith("_") and callable(member):
                    yield from _of_object(module, f"{prefix}{name}.{method}", member)


def _of_object(module: str, name: str, value: object) -> Iterator[Entry]:
    docstring = inspect.getdoc(value)
    if docstring:
        yield Entry(module, name, docstring)
