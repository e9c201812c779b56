"""Ctrl-C at random moments of commands: how they end, and what they leave.

    python -m benchmarks.interrupts --signals 100 --out benchmarks/results/interrupts

Each of `generate`, `chat`, `serve` and `profile` is run with the demo model, undisturbed first, and
then again and again with one SIGINT at a moment drawn between its start and its end: every other
time at a terminal, where Ctrl-C is typed and reaches whoever else is in the foreground, and every
other time with pipes. An interrupt is right where the command ends with 130, what stands on
standard output begins the undisturbed output, and no process, no file of Ray's and no core is left.
These end with 0: a command that was done already, `serve` once it serves, and `chat` at a terminal,
where Ctrl-C ends an answer and Ctrl-D the conversation. Python itself, before it has read the
program, ends by the signal, which a shell calls 130 as well, or with 1 while it looks for packages.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from benchmarks.interrupted_command import Command, Run, Undisturbed
from benchmarks.runs import Json, table_option, where_and_when, write_report
from hotcold.model.files.locate import locate_model

INTERRUPTED = 130
_QUESTION = "What does textwrap.dedent do?"
_GREEDY = ("--temperature", "0", "--max-tokens", "400", "--ignore-eos")
_PROFILED = "Return the text with all whitespace removed from its ends.\n" * 200
PHASES = ("before Ray", "before output", "in the output", "after it")
COMMANDS = {
    "generate": Command(("generate", "--prompt", "Return the", *_GREEDY)),
    "chat": Command(("chat", "--plain", *_GREEDY), question=_QUESTION),
    "serve": Command(("serve", "--port", "0", "--no-page"), ends_by_itself=False),
    "profile": Command(
        ("profile", "--text", "text.txt", "--out", "profile.hot", "--inputs", "0"),
        files=(("text.txt", _PROFILED),),
    ),
}


@dataclass(frozen=True)
class Interrupt:
    """One interrupt: when, and what came of it."""

    command: str
    terminal: bool
    moment_s: float
    had_ray: bool  # when the signal came
    seen: float  # of the undisturbed output, then: a share of its characters
    output: float  # in the end
    status: int
    wrong: str  # what was left or written besides; "" for nothing
    is_early: bool = False  # Python had not read the program

    @property
    def phase(self) -> str:
        """What the command was doing when the signal came."""
        if self.seen:
            return PHASES[3] if self.seen >= 1 and self.command != "serve" else PHASES[2]
        return PHASES[1] if self.had_ray else PHASES[0]

    @property
    def expected_statuses(self) -> set[int]:
        """The exit statuses that are right."""
        if self.phase == PHASES[0]:
            return {1} if self.is_early else {INTERRUPTED, -signal.SIGINT}
        goes_on = self.command == "serve" or (self.command == "chat" and self.terminal)
        if goes_on and self.phase != PHASES[1]:
            return {0, INTERRUPTED} if self.phase == PHASES[3] else {0}  # it may be ending
        return {INTERRUPTED, 0} if self.output >= 1 else {INTERRUPTED}

    @property
    def problem(self) -> str:
        """All that was wrong with it; "" for nothing."""
        is_right = self.status in self.expected_statuses
        status = "" if is_right else f"exit status {self.status}"
        return "; ".join(filter(None, [status, self.wrong]))


def interrupt_of(name: str, terminal: bool, run: Run, undisturbed: str) -> Interrupt:
    """What came of a run, beside the undisturbed output."""
    seen, output, whole = (text.rstrip("> \n") for text in (run.seen, run.output, undisturbed))
    found = Interrupt(
        name,
        terminal,
        run.moment_s,
        run.had_ray,
        len(seen) / len(whole),
        len(output) / len(whole),
        run.status,
        "; ".join(run.left),
        "init_import_site" in run.errors,
    )
    wrong = list(run.left)
    if not whole.startswith(output):
        wrong.append(f"other output: {output[-80:]!r}")
    if "Traceback" in run.errors and found.phase != PHASES[0]:
        wrong.append(f"a traceback: {run.errors.strip().splitlines()[-1]}")
    return replace(found, wrong="; ".join(wrong))


@contextmanager
def beside(count: int) -> Iterator[None]:
    """So many programs that keep a core busy."""
    with ExitStack() as stack:
        for _ in range(count):
            busy = [sys.executable, "-c", "while True: pass"]
            stack.callback(stack.enter_context(subprocess.Popen(busy)).kill)
        yield


def _interrupt(name: str, count: int, seed: int) -> Iterator[Interrupt]:
    """Interrupt a command `count` times, in turn at a terminal and with pipes."""
    command = COMMANDS[name]
    undisturbed: dict[bool, Undisturbed] = {}
    for number in range(count):
        terminal = number % 2 == 0
        if terminal not in undisturbed:
            undisturbed[terminal] = command.run_undisturbed(terminal)
        whole = undisturbed[terminal]
        # One generator an interrupt: its seed and number repeat it.
        moment_s = random.Random(f"{seed} {name} {number}").uniform(0.02, whole.took_s * 1.05)
        run = command.run(terminal, moment_s)
        found = interrupt_of(name, terminal, run, whole.output)
        where = "terminal" if terminal else "pipes"
        click.echo(
            f"{name} {number} ({where}), seed {seed}, {moment_s:.2f} of {whole.took_s:.2f} s, "
            f"{found.phase}: status {found.status} {found.problem or 'right'}",
            err=True,
        )
        if found.problem:
            click.echo(run.errors[-4000:], err=True)
        yield found


def table_of(report: Json) -> str:
    """The report as Markdown: a row for each command, with and without a terminal, and phase."""
    beside_text = f", beside {report['beside']} busy programs" if report["beside"] else ""
    lines = [
        f"The demo model; {report['machine']}; {report['date']}; "
        f"seed {report['seed']}{beside_text}",
        "",
        "| command | at | phase | interrupts | right | exit statuses |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    interrupts = [Interrupt(**each) for each in report["interrupts"]]
    for name, terminal, phase in itertools.product(COMMANDS, (True, False), PHASES):
        wanted = (name, terminal, phase)
        found = [each for each in interrupts if (each.command, each.terminal, each.phase) == wanted]
        if found:
            right = sum(not each.problem for each in found)
            counts = _counts([each.status for each in found])
            where = "terminal" if terminal else "pipes"
            lines.append(f"| {name} | {where} | {phase} | {len(found)} | {right} | {counts} |")
    wrong = [each for each in interrupts if each.problem]
    lines += ["", *(f"- {each.command}, {each.phase}: {each.problem}" for each in wrong)]
    return "\n".join(lines).rstrip() + "\n"


def _counts(statuses: Sequence[int]) -> str:
    return ", ".join(f"{status}: {statuses.count(status)}" for status in sorted(set(statuses)))


@click.command()
@click.option(
    "--signals",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Interrupts of each command.",
)
@click.option("--command", "names", type=click.Choice(list(COMMANDS)), multiple=True)
@click.option("--beside", "num_beside", default=0, show_default=True, help="Busy programs.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    signals: int, names: tuple[str, ...], num_beside: int, seed: int, out: Path | None
) -> None:
    """Interrupt commands at random moments, and look at what they leave."""
    with beside(num_beside):
        found = [each for name in names or COMMANDS for each in _interrupt(name, signals, seed)]
    report = where_and_when(locate_model(None), 2) | {
        "beside": num_beside, "seed": seed, "interrupts": [asdict(each) for each in found],
    }  # fmt: skip
    write_report(report, table_of(report), out)
    if any(each.problem for each in found):
        raise click.ClickException("some interrupts were not right; see the report")


if __name__ == "__main__":
    main()
