"""Sows one fault at a time into a copy of a checkout, and sees which tests notice.

    python -m benchmarks.fault_sowing --out benchmarks/results/fault-sowing
    python -m benchmarks.fault_sowing --checkout ../older --out benchmarks/results/fault-sowing

`benchmarks/sown_faults.py` lists the faults, each with the tests that are to catch it. A fault is
found by its text within a package, and a test by its name, so one list serves several layouts of
the same code. All tests run without faults first; then, for each fault, its own in a process of
their own. Only tests that pass without the fault and fail with it have caught it; a process that
hangs or dies has failed too. OUT.json keeps the results of each commit; a later run replaces those
of its own faults.
"""

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.sown_faults import FAULTS, Fault

Json = dict[str, Any]

PACKAGES = (
    "actors",
    "numba_kernels",
    "cuda_kernels",
    "model",
    "placement",
    "predictors",
    "jobs",
    "ui",
)
_HERE = Path(__file__).resolve().parents[1]
_SLOW_IMPORTS = ["torch", "transformers", "numba", "scipy.optimize", "hypothesis", "pytest"]
_SUFFIXES = (".py", ".cu", ".cuh", ".js")
_OLD_S = 1_600_000_000  # when every file of a copy was last changed, as far as caches can tell
_LONGEST_S = 200.0  # of one fault's tests
_LONGEST_TEST_S = 25, 60  # of one test, the second where kernels are compiled
_STATES = ("caught", "missed", "untested", "broken")
_NO_TEST = "there is no such test"
_PASSED, _FAILED = 0, 1  # pytest's exit statuses; others say that tests did not run


@dataclass(frozen=True)
class Result:
    """What became of one fault; `failed` are the tests that noticed it."""

    # "caught", "missed", "untested" where there is no such test, or "broken" where the fault has no
    # place, or its tests fail without it
    status: str
    seconds: float
    why: str = ""
    failed: tuple[str, ...] = ()


class Sources:
    """A folder's sources: where a fault's text stands, and which tests there are."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the packages."""
        self.folder = folder

    def find(self, fault: Fault) -> tuple[Path, str, str]:
        """The file that holds the fault's text, the text there, and what takes its place.

        Errors:  LookupError where it is in no file, or more than once
        """
        files = [
            file
            for file in sorted((self.folder / fault.package).rglob("*"))
            if file.suffix in _SUFFIXES
        ]
        for old, new in fault.spellings:
            counts = {file: file.read_text().count(old) for file in files}
            found = [file for file, count in counts.items() if count]
            if len(found) > 1:
                found = [file for file in found if file.stem == fault.stem]
            if len(found) == 1 and counts[found[0]] == 1:
                return found[0], old, new
        raise LookupError(f"no single place in {fault.package} has the text of {fault.name}")

    def test_id(self, test: str) -> str:
        """Pytest's id of `stem::test_name` or `test_name`, perhaps with [parameters].

        Of several with a | between them, the first that there is.
        Errors:  LookupError where no file has such a test, or several have
        """
        names = test.split("|")
        for name in names[:-1]:
            with suppress(LookupError):
                return self.test_id(name)
        stem, _, called = names[-1].rpartition("::")
        name = called.partition("[")[0]
        pattern = re.compile(rf"^def {name}\(", re.MULTILINE)
        found = [f for f in self._test_files() if pattern.search(f.read_text())]
        if len(found) > 1:
            found = [file for file in found if file.stem == stem]
        if len(found) != 1:
            raise LookupError(f"found in {len(found)} files" if found else _NO_TEST)
        return f"{found[0].relative_to(self.folder)}::{called}"

    def _test_files(self) -> list[Path]:
        return sorted((self.folder / "tests").rglob("test_*.py"))


def out_of_place(checkout: Path, fault: Fault) -> str:
    """What has moved since the fault was listed, in a line; "" where it can be sown."""
    sources = Sources(checkout)
    try:
        _, old, new = sources.find(fault)
        for test in fault.tests:
            sources.test_id(test)
    except LookupError as problem:
        return f"{fault.name}: {problem}"
    return "" if (old, new) == (fault.old, fault.new) else f"{fault.name}: has its earlier text"


class Tree(Sources):
    """A copy of a checkout that faults are sown into."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        """Copy what the checkout's `git ls-files` lists, changed files as they are."""
        super().__init__(folder)
        listed = subprocess.run(
            ["git", "-C", str(checkout), "ls-files", "-z"], capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if not (checkout / name).is_file():
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / name, folder / name)
            os.utime(folder / name, (_OLD_S, _OLD_S))
        self._num_sown = 0

    @contextmanager
    def sown(self, fault: Fault) -> Iterator[Path]:
        """The tree with the fault, in the file that is yielded; without it again afterwards."""
        file, old, new = self.find(fault)
        whole = file.read_text()
        self._num_sown += 1
        try:
            file.write_text(whole.replace(old, new))
            changed = _OLD_S + self._num_sown  # caches go by a file's time and size
            os.utime(file, (changed, changed))
            yield file
        finally:
            file.write_text(whole)
            os.utime(file, (_OLD_S, _OLD_S))


class Runner:
    """Runs tests in a tree, each run in a process of its own that has imported what takes long."""

    def __init__(self, tree: Tree, cache: Path) -> None:
        """`cache` keeps compiled kernels."""
        self._tree = tree
        self._cache = cache
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_SLOW_IMPORTS)

    def run(
        self, tests: Sequence[str], changed: Path | None = None, longest_s: float | None = None
    ) -> tuple[int, str]:
        """Pytest's exit status, 1 too for a run that hangs or dies, and what it wrote.

        With `changed`, a file that was not so when kernels were compiled into the cache, it ends at
        the first test that fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            process = self._context.Process(
                target=_run_tests,
                args=(self._tree.folder, self._cache, tests, changed, output, Path(folder)),
            )
            process.start()
            process.join(longest_s)
            hangs = process.is_alive()
            if hangs:
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
            said = output.read_text(errors="replace") if output.exists() else ""
        if hangs:
            return _FAILED, f"{said}\nhangs"
        status = process.exitcode
        assert status is not None
        return (_FAILED, f"{said}\nends by signal {-status}") if status < 0 else (status, said)


def _run_tests(
    folder: Path, cache: Path, tests: list[str], changed: Path | None, output: Path, spare: Path
) -> None:
    """Become a process in `folder` that runs pytest and nothing else."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(folder)}
    sys.path = [str(folder), *(p for p in sys.path if p and Path(p).resolve() != _HERE)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[name]
    compiles = changed is not None and changed.relative_to(folder).parts[0].endswith("_kernels")
    import pytest

    options = ["-n0", "-q", "--tb=no", "-p", "no:cacheprovider"]
    if changed is not None:
        options += ["-x", f"--timeout={_LONGEST_TEST_S[compiles]}"]
    status = pytest.main([*options, f"--basetemp={spare / 'tests'}", *tests])
    sys.stdout.flush()
    os._exit(int(status))  # threads of a service that a fault has broken may never end


def unfit_tests(tree: Tree, runner: Runner, faults: Sequence[Fault]) -> dict[str, str]:
    """Tests that cannot catch anything, and why: they do not exist, or fail without a fault."""
    unfit, found = {}, {}
    for test in sorted({test for fault in faults for test in fault.tests}):
        try:
            found[tree.test_id(test)] = test
        except LookupError as problem:
            unfit[test] = str(problem)
    if not found:
        return unfit
    status, said = runner.run(list(found))
    if status not in (_PASSED, _FAILED) or (status == _FAILED and not _failed(said)):
        return unfit | dict.fromkeys(found.values(), f"without faults: {_last_line(said)}")
    for test_id, test in found.items():
        name = test_id.rpartition("/")[2]
        if any(failed == name or failed.startswith(f"{name}[") for failed in _failed(said)):
            unfit[test] = "fails without the fault"
    return unfit


def try_fault(tree: Tree, runner: Runner, fault: Fault, unfit: dict[str, str]) -> Result:
    """Run the fault's tests with it."""
    started = time.monotonic()
    if bad := [f"{test}: {unfit[test]}" for test in fault.tests if test in unfit]:
        is_missing = bad[0].endswith(_NO_TEST)
        return Result("untested" if is_missing else "broken", 0.0, bad[0])
    try:
        with tree.sown(fault) as file:
            status, said = runner.run([*map(tree.test_id, fault.tests)], file, _LONGEST_S)
    except LookupError as problem:
        return Result("broken", 0.0, str(problem))
    seconds = round(time.monotonic() - started, 1)
    if status == _FAILED:
        failed = tuple(_failed(said))
        return Result("caught", seconds, "" if failed else _last_line(said), failed)
    if status == _PASSED and " skipped" not in said:
        return Result("missed", seconds)
    return Result("broken", seconds, f"exit status {status}: {_last_line(said)}")


def _failed(said: str) -> list[str]:
    """The tests that pytest's summary names, without their folders."""
    lines = r"^(?:FAILED|ERROR) \S*?/(test_\w+\.py::.*?)(?: - .*)?$"
    return re.findall(lines, said, re.MULTILINE)


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip("= ~+") if lines else "said nothing"


def try_all(
    checkout: Path,
    faults: Sequence[Fault],
    jobs: int,
    cache: Path | None,
    on_result: Callable[[Fault, Result], None],
) -> None:
    """Try the faults, `jobs` at a time, each in a copy of the checkout."""
    with tempfile.TemporaryDirectory(prefix="sown-") as spare:

        def work(number: int) -> None:
            tree = Tree(checkout, Path(spare) / str(number))
            # Copies share no cache: whoever runs without a fault writes to it.
            own = (cache or Path(spare) / "cache") / str(number)
            own.mkdir(parents=True, exist_ok=True)
            runner, part = Runner(tree, own), faults[number::jobs]
            unfit = unfit_tests(tree, runner, part)
            for fault in part:
                on_result(fault, try_fault(tree, runner, fault, unfit))

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, range(jobs)))


def commit_of(checkout: Path) -> str:
    """The commit that a checkout is of; with a + where it has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    code = [f"{package}/" for package in (*PACKAGES, "tests")]
    return git("rev-parse", "--short=7", "HEAD") + "+" * bool(git("diff", "HEAD", "--", *code))


def table(report: Json) -> str:
    """The report for people."""
    commits = list(report["commits"])
    lines = ["# Sown faults", ""]
    for commit in commits:
        run = report["commits"][commit]
        counts = Counter(result["status"] for result in run["faults"].values())
        told = ", ".join(f"{counts[s]} {s}" for s in _STATES if counts[s])
        seconds = sum(result["seconds"] for result in run["faults"].values())
        lines.append(f"- {commit}, {run['date']}: {told}; {seconds / 60:.0f} minutes of one core")
    known = [fault for fault in FAULTS if any(_found(report, c, fault) for c in commits)]
    lines += ["", *_counts("package", [fault.package for fault in known], report, known), ""]
    lines += [*_counts("kind", [fault.kind for fault in known], report, known), ""]
    lines += [_row(["fault", "package", "kind", *commits, "noticed by"]), _rule(4 + len(commits))]
    for fault in known:
        found = [_found(report, commit, fault) for commit in commits]
        states = [result["status"] if result else "" for result in found]
        last = next((result for result in reversed(found) if result), None)
        by = ", ".join(f"`{test}`" for test in last["failed"]) or last["why"] if last else ""
        lines.append(_row([fault.name, fault.package, fault.kind, *states, by]))
    return "\n".join(lines) + "\n"


def _found(report: Json, commit: str, fault: Fault) -> Json | None:
    result: Json | None = report["commits"][commit]["faults"].get(fault.name)
    return result


def _counts(title: str, values: list[str], report: Json, known: list[Fault]) -> list[str]:
    """A table of how many faults of each value every commit's tests caught."""
    commits = list(report["commits"])
    lines = [_row([title, "faults", *(f"caught in {c}" for c in commits)]), _rule(2 + len(commits))]
    for value in sorted(set(values)):
        own = [f for f, v in zip(known, values, strict=True) if v == value]
        found = [[_found(report, commit, fault) for fault in own] for commit in commits]
        caught = [
            sum(r is not None and r["status"] == "caught" for r in column) for column in found
        ]
        lines.append(_row([value, str(len(own)), *map(str, caught)]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(width: int) -> str:
    return _row(["---"] * width)


def _chosen(names: Sequence[str], packages: Sequence[str]) -> list[Fault]:
    known = {fault.name for fault in FAULTS}
    if unknown := sorted(set(names) - known):
        raise click.ClickException(f"no fault is named {unknown[0]}")
    return [
        fault
        for fault in FAULTS
        if (not names or fault.name in names) and (not packages or fault.package in packages)
    ]


def _part(faults: list[Fault], text: str) -> list[Fault]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.ClickException(f"--part is {text}; give a part such as 2/5")
    return faults[int(number) - 1 :: int(count)]


@click.command()
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), default=_HERE)
@click.option("--only", multiple=True, metavar="FAULT", help="This fault; may be repeated.")
@click.option("--package", "packages", type=click.Choice(PACKAGES), multiple=True)
@click.option("--part", default="1/1", help="Every fifth fault from the second on: 2/5.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Faults at a time.")
@click.option("--cache", type=click.Path(path_type=Path), help="Keeps kernels for the next run.")
@click.option("--out", type=click.Path(path_type=Path), help="Adds to OUT.json, writes OUT.md.")
@click.option("--check", is_flag=True, help="Sow nothing: has each fault its place and tests?")
def main(
    checkout: Path,
    only: tuple[str, ...],
    packages: tuple[str, ...],
    part: str,
    jobs: int,
    cache: Path | None,
    out: Path | None,
    check: bool,
) -> None:
    """Sow faults into copies of CHECKOUT; status 1 where one is not caught."""
    faults = _part(_chosen(only, packages), part)
    if check:
        problems = [text for fault in faults if (text := out_of_place(checkout, fault))]
        click.echo("\n".join(problems) or f"{len(faults)} faults have their places and tests")
        sys.exit(bool(problems))
    commit, found = commit_of(checkout), {}

    def show(fault: Fault, result: Result) -> None:
        found[fault.name] = result
        by = result.why or " ".join(result.failed)
        click.echo(f"{result.status:7}{result.seconds:6.1f} s  {fault.name}  {by}")
        if out is not None:
            _write(out, commit, found)

    # Kernels of one checkout's sources are of no use to another's.
    own = hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:8]
    try_all(checkout, faults, jobs, cache and cache.resolve() / own, show)
    if any(result.status != "caught" for result in found.values()):
        sys.exit(1)


def _write(out: Path, commit: str, found: dict[str, Result]) -> None:
    file = out.with_name(f"{out.name}.json")
    report = json.loads(file.read_text()) if file.exists() else {"commits": {}}
    run = report["commits"].setdefault(commit, {"date": "", "faults": {}})
    run["date"] = date.today().isoformat()
    results = run["faults"] | {name: vars(result) for name, result in found.items()}
    run["faults"] = {fault.name: results[fault.name] for fault in FAULTS if fault.name in results}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    out.with_name(f"{out.name}.md").write_text(table(report))


if __name__ == "__main__":
    main()
