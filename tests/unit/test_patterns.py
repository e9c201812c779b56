"""Regular expressions of the library read any text in a time that grows with its length alone."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import hotcold
from tests.slow_texts import MOST_S, slowest

_METHODS = ("fullmatch", "match", "search", "sub", "subn", "findall", "finditer", "split")


class _Found(NamedTuple):
    """A regular expression, and the methods of it that are called."""

    place: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]


class _Unknown(dict[str, Any]):
    """Variables of functions, each of which is the text "name", as is all that it has."""

    class Text(str):
        def __getattr__(self, name: str) -> _Unknown.Text:
            return self

    def __missing__(self, name: str) -> _Unknown.Text:
        return self.Text("name")


def _modules() -> Iterator[ModuleType]:
    for one in pkgutil.walk_packages(hotcold.__path__, "hotcold."):
        try:
            yield importlib.import_module(one.name)
        except ModuleNotFoundError as missing:
            assert missing.name == "cupy", missing


@cache
def _found() -> list[_Found]:
    found: dict[tuple[Any, int], _Found] = {}
    trees = {module: ast.parse(Path(module.__file__ or "").read_text()) for module in _modules()}
    used = {module: _used(tree) for module, tree in trees.items()}
    everywhere = {one for names in used.values() for one in names}
    for module, tree in trees.items():
        kept = list(_kept(module))
        for name, pattern in kept:
            of_name = {method for given, method in everywhere if given == name}
            if name.startswith("_"):
                of_name = {method for given, method in used[module] if given == name}
            methods = of_name or {method for _, method in used[module]}
            place = f"{module.__name__}: {name}"
            found[pattern.pattern, pattern.flags] = _Found(place, pattern, tuple(sorted(methods)))
        for one in _written(module, tree):
            found.setdefault((one.pattern.pattern, one.pattern.flags), one)
    return list(found.values())


def _used(tree: ast.Module) -> set[tuple[str, str]]:
    """Names, and methods of theirs that patterns have."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {(_name(node.value), node.attr) for node in calls if node.attr in _METHODS}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _kept(module: ModuleType) -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Those that a module and its classes keep, also within what they keep."""
    for owner in (module, *(one for one in vars(module).values() if isinstance(one, type))):
        for name, value in vars(owner).items():
            inner = value.values() if isinstance(value, dict) else value
            for one in inner if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(one, re.Pattern):
                    yield name, one


def _written(module: ModuleType, tree: ast.Module) -> Iterator[_Found]:
    """Those that are given to functions of `re`, and to fields of pydantic, where it is called."""
    assigned = {
        node.value: _name(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    variables = _Unknown(vars(module))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        method, named = _name(node.func), {one.arg: one.value for one in node.keywords}
        flags = named.get("flags", ast.Constant(0))
        if ast.unparse(node.func).startswith("re.") and method in (*_METHODS, "compile"):
            given = node.args[0]
            flags = node.args[1] if method == "compile" and node.args[1:] else flags
        elif "pattern" in named:
            given, method = named["pattern"], "search"
        else:
            continue
        methods = {method}
        if method == "compile":
            name = assigned.get(node, "")
            methods = {used for whose, used in _used(tree) if whose == name}
        text, number = (eval(ast.unparse(one), {}, variables) for one in (given, flags))
        place = f"{module.__name__}, line {node.lineno}"
        yield _Found(place, re.compile(text, number), tuple(sorted(methods)))


def test_all_are_found() -> None:
    """Some of each kind: of a module, in a dictionary, in a function, in a field's declaration."""
    places = " ".join(one.place for one in _found())
    for module, name in (
        ("actors.protocol.options", "_SIZE"),
        ("ui.page.routes", "_ALLOWED"),
        ("model.files.atomic_write", ""),
        ("ui.api.tools.schemas", ""),
    ):
        assert f"hotcold.{module}{': ' if name else ', line '}{name}" in places
    assert all(one.methods for one in _found()), [one for one in _found() if not one.methods]


@pytest.mark.parametrize(
    ("slow", "method"),
    [
        (r"(\d+h?)+m", "fullmatch"),
        (r"[+-]?(\d+\.?\d*|((\d+\.?\d*|\.\d+)(s|m|h))+)", "fullmatch"),
        (r"^\s*[\w-]+\s*::=", "search"),
        (r" +$", "sub"),
        (r'"(\\.|[^"\\])*"', "findall"),
    ],
)
def test_slow_ones_are_told(slow: str, method: str) -> None:
    assert slowest(re.compile(slow, re.MULTILINE), [method])[0] > MOST_S


def test_no_text_is_slow() -> None:
    slow = []
    for one in _found():
        took, text = slowest(one.pattern, one.methods)
        if took > MOST_S:  # also where the machine was busy
            took = min(took, slowest(one.pattern, one.methods)[0])
        if took > MOST_S:
            slow.append(f"{one.place}: {one.pattern.pattern!r} takes {took:.2f} s for {text}")
    assert not slow, "\n".join(slow)
