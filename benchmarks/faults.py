"""Faults at random moments while requests run: what becomes of the tokens.

    python -m benchmarks.faults --faults 1000 --out benchmarks/results/faults

Half of the faults come over one long generation after another, half over a batch of eight requests
with prompts of 1 to 400 tokens, greedy and drawn. Each is of a kind of `benchmarks.fault_kinds`:
services killed, stopped and paused, the driver or everything paused, memory taken, /dev/shm full,
another number of CPU services, a disk that hardly reads. Which, and what it does, its number and
`--seed` say; `--only` takes the kinds that are named. With `--model` and `--resident 0.5` half of a
model's neurons or experts stay on storage, in a bundle file beside it.

Every answer is compared with that of an undisturbed run of the same system, whatever the number of
CPU services while it ran.

The time to recover is from the end of what was done to the first token after that; where a service
was lost, to the first one once all services run again. Time in which this process did not run is
left out: of a machine that was suspended, or busy with others. Faults keep the pace that the system
allows: fewer than ten lost services in a minute in which services serve. In the end no slot and no
page of the KV cache may be lent.
"""

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import psutil

from benchmarks.fault_kinds import KINDS, SCALED, SLOW_READS, STARVED, Kind, possible_kinds
from benchmarks.fault_load import Load, leaks, requests_of
from benchmarks.runs import Json, table_option, where_and_when, write_report
from benchmarks.stored_system import on_storage
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import locate_model

_A_MINUTE_S, _MAX_A_MINUTE = 66.0, 9  # a fault may be noticed some seconds late
# The kernel says that it has killed somebody for want of memory, and not whom: a service that is
# lost soon after is taken for it.
_STARVED_S = 20.0
_LOOK_S = 0.05
_SETTLED_S = 0.6  # a fault that may lose a service is over when all have served for so long
_LONGEST_RECOVERY_S = 300.0


@dataclass
class Fault:
    """One fault; moments by a `RunningClock`, in seconds."""

    number: int
    kind: str
    over_s: float
    recovered_s: float


def inject(
    system: System, load: Load, kind: Kind, number: int, chance: random.Random
) -> Fault | None:
    """One fault at a random moment; returns when tokens flow again, None where they do not."""
    processes: dict[str, int] = system.call("processes")
    time.sleep(chance.uniform(0.05, 0.5))
    began_s = load.clock.now_s
    kind.do(system, processes, chance)
    over_s = load.clock.now_s if kind.loses is not True else began_s
    harmed_s = over_s  # the last moment at which the system was not seen whole
    while not load.wrong:
        time.sleep(_LOOK_S)
        now = load.clock.now_s
        try:
            is_whole = serves(system)
        except HotcoldError as error:
            load.wrong.append(f"after fault {number}, {kind.name}: {error}")
            break
        if not is_whole:
            harmed_s = now
        first_s = load.first_after(harmed_s)
        # A service that was paused may be given up just as it goes on.
        if first_s is not None and (kind.loses is False or now - harmed_s > _SETTLED_S):
            return Fault(number, kind.name, over_s, first_s)
        if now - over_s > _LONGEST_RECOVERY_S:
            load.wrong.append(f"no token for long after fault {number}, {kind.name}")
    return None


def serves(system: System) -> bool:
    """Whether all processes of a system run, and no service is being replaced."""
    processes: dict[str, int] = system.call("processes")
    if system.call("progress").stage.startswith("restarting"):
        return False
    return all(map(_runs, processes.values()))


def _runs(process_id: int) -> bool:
    """Whether a process has neither ended nor been stopped."""
    ended_or_stopped = psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process_id).status() not in ended_or_stopped
    return False


class Pace:
    """When the next fault of a kind may come, by what the system allows."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_MAX_A_MINUTE)
        self._last: dict[str, float] = {}
        self._mended_s = 0.0

    def mended(self, took_s: float) -> None:
        """A fault was over after so long, which does not count in the system's minute."""
        self._mended_s += took_s

    def allows(self, kind: Kind) -> bool:
        """Whether that kind may come now; taken as done if so."""
        now = time.monotonic()
        if now - self._last.get(kind.name, -math.inf) < kind.rest_s:
            return False
        if kind.loses is not False and now - self._last.get(STARVED, -math.inf) < _STARVED_S:
            return False
        if kind.loses is not False:
            served_s = now - self._mended_s
            recent = sum(served_s - at_s < _A_MINUTE_S for at_s in self._losses)
            if recent + kind.num_lost > _MAX_A_MINUTE:
                return False
            self._losses += kind.num_lost * [served_s]
        self._last[kind.name] = now
        return True


def _part(
    system: System,
    load: Load,
    names: list[str],
    numbers: range,
    seed: int,
    pace: Pace,
    end_s: float,
) -> Json:
    faults: list[Fault] = []
    load.start()
    for number in numbers:
        if time.monotonic() > end_s:
            break
        chance = random.Random(f"{seed} {number}")  # which repeats this fault alone
        kind = next(kind for kind in _drawn(names, chance) if pace.allows(kind))
        fault = inject(system, load, kind, number, chance)
        if fault is None:
            break
        faults.append(fault)
        took_s = fault.recovered_s - fault.over_s
        pace.mended(took_s)
        click.echo(f"{number}, seed {seed}: {kind.name}: {took_s:.2f} s", err=True)
    load.stop()
    if SCALED in names and not load.wrong:
        system.call("scale", 2)
    lent = leaks(system)
    if load.wrong or lent:
        click.echo("; ".join([*load.wrong, lent]), err=True)
    took = [[f.kind, f.number, f.recovered_s - f.over_s] for f in faults]
    return {"faults": took, "right": load.num_right, "wrong": load.wrong, "leaks": lent}


def _drawn(names: list[str], chance: random.Random) -> Iterator[Kind]:
    """Kinds, drawn until one is allowed; where none is, after a while."""
    for count in itertools.count():
        if count and count % (4 * len(names)) == 0:
            time.sleep(0.5)
        yield KINDS[chance.choice(names)]


def table_of(report: Json) -> str:
    """The report as Markdown, a row for each load and kind of fault."""
    name = report.get("model", "The demo model")
    kept = report.get("resident", 1.0)
    stored = f"; {kept:.0%} of the neurons in memory" if kept < 1 else ""
    lines = [
        f"{name}: {report['shape']}; {report['machine']}; {report['date']}; a GPU service "
        f"on the CPU and two CPU services{stored}",
        "",
        "| load | fault | faults | answers as undisturbed | others | median s | worst s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, part in report["parts"].items():
        answers = f"{part['right']} | {len(part['wrong'])}"
        for kind in KINDS:
            took = [seconds for what, _, seconds in part["faults"] if what == kind]
            if took:
                spread = f"{median(took):.2f} | {max(took):.2f}"
                lines.append(f"| {name} | {kind} | {len(took)} | {answers} | {spread} |")
    every = [seconds for part in report["parts"].values() for _, _, seconds in part["faults"]]
    if every:
        lines += ["", f"{len(every)} faults, seed {report['seed']}: median {median(every):.2f} s, "
                  f"worst {max(every):.2f} s."]  # fmt: skip
    lent = [part["leaks"] for part in report["parts"].values() if part["leaks"]]
    lines += ["", "Seconds are from the fault's end to the next token, of any request; where a "
              "service is always lost, from its beginning to the first once all run. "
              f"Left lent in the end: {'; '.join(lent) or 'no request, no page'}."]  # fmt: skip
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--faults", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--exchange", type=click.Choice(["arena", "calls"]), default="arena")
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", type=float, default=math.inf, help="Fewer faults, if this is over.")
@click.option("--context", default=4096, show_default=True, help="Of the long generation.")
@click.option("--only", type=click.Choice(list(KINDS)), multiple=True, help="Only these kinds.")
@click.option("--model", help="The embedded model without it.")
@click.option("--resident", default=1.0, show_default=True, help="Neurons in memory, a share.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    faults: int,
    exchange: str,
    seed: int,
    minutes: float,
    context: int,
    only: tuple[str, ...],
    model: str | None,
    resident: float,
    out: Path | None,
) -> None:
    """Do a system harm while requests run, and compare what they answer."""
    names = [name for name in possible_kinds() if not only or name in only]
    # A system with neurons on storage refuses to be scaled; another reads nothing.
    needless = SCALED if resident < 1 else SLOW_READS
    names = [name for name in names if name != needless]
    if not names:
        raise click.ClickException(f"not permitted here: {', '.join(only)}")
    path = locate_model(model)
    config = SystemConfig(
        str(path),
        num_cpu_actors=2,
        num_threads=2,
        context_length=context,
        kv_positions=8 * context,
        exchange=exchange,
    )
    if resident < 1:
        config = on_storage(config, resident)
    parts: Json = {}
    pace, half = Pace(), faults // 2
    spans = {1: range(half), 8: range(half, faults)}
    with System.start(config) as system:
        for name, count in (("one long generation", 1), ("batch of eight", 8)):
            requests = requests_of(count, config.context_length)
            load = Load(system, requests)
            end_s = time.monotonic() + minutes * 30  # half of them
            parts[name] = _part(system, load, names, spans[count], seed, pace, end_s)
            if parts[name]["wrong"]:
                break
    report = where_and_when(path, config.num_threads) | {
        "parts": parts, "exchange": exchange, "seed": seed,
    }  # fmt: skip
    if model is not None:
        report |= {"model": path.name, "resident": resident}
    write_report(report, table_of(report), out)
    if any(part["wrong"] or part["leaks"] for part in parts.values()):
        raise click.ClickException("some answers differ; see the report")


if __name__ == "__main__":
    main()
