"""Faults at random moments while requests run: what becomes of the tokens.

    python -m benchmarks.faults --faults 1000 --out benchmarks/results/faults.md

Half of the faults come over one long generation after another, half over a batch of eight requests
with prompts of 1 to 400 tokens, greedy and drawn. Services are killed, stopped and paused, the
driver or everything is paused, the number of CPU services changes. Which, and what it does, its
number and `--seed` say; `--only` takes the kinds that are named. With `--model` and `--resident
0.5` half of a model's neurons or experts stay on storage.

Every answer is compared with that of an undisturbed run of the same system. The time to recover is
from the end of what was done to the first token after that; where a service was lost, to the first
one once all services run again. Faults keep the pace that the system allows: fewer than ten lost
services in a minute. In the end no request and no page of the KV cache may be lent.
"""

import math
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import click
import psutil

from benchmarks.frame import Json, head, heading, program, progress, table
from benchmarks.load import Load, leaks, requests_of
from benchmarks.storage import on_storage
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import locate_model

_A_MINUTE_S, _MAX_A_MINUTE = 66.0, 9  # a fault may be noticed some seconds late
_SETTLED_S = 0.6  # a fault that may lose a service is over when all have served for so long
_LONGEST_S = 300.0
Pids = dict[str, int]
Harm = Callable[[System, Pids, random.Random], None]


def _services(pids: Pids, chance: random.Random, count: int = 1) -> list[int]:
    return [pids[name] for name in chance.sample(sorted({*pids} - {"driver"}), count)]


def _signal(
    number: int, of: Callable[[Pids, random.Random], Iterable[int]], longest_s: float = 0.0
) -> Harm:
    """Send processes a signal; with `longest_s` let them go on after a while."""

    def do(system: System, pids: Pids, chance: random.Random) -> None:
        chosen = list(of(pids, chance))
        for each in (number, signal.SIGCONT) if longest_s else (number,):
            for pid in chosen:
                with suppress(ProcessLookupError):  # given up as stuck, and ended
                    os.kill(pid, each)
            if longest_s and each == number:
                time.sleep(chance.uniform(0.05, longest_s))

    return do


def _scale(system: System, pids: Pids, chance: random.Random) -> None:
    """One CPU service becomes two, two become one; what cannot be had is told, and all goes on."""
    with suppress(HotcoldError):
        system.call("scale", 3 - sum(name.startswith("cpu") for name in pids))


@dataclass(frozen=True)
class Kind:
    """`do` returns when what it did is over. `loses` a service, always, perhaps (None), never."""

    do: Harm
    loses: bool | None = False
    num_lost: int = 1


SCALED = "scaled"
KINDS = {
    "kill -9": Kind(_signal(signal.SIGKILL, _services), True),
    "kill -9 of two": Kind(
        _signal(signal.SIGKILL, lambda pids, chance: _services(pids, chance, 2)), True, 2
    ),
    "SIGSTOP": Kind(_signal(signal.SIGSTOP, _services), True),
    "service paused": Kind(_signal(signal.SIGSTOP, _services, 3.0), None),
    "driver paused": Kind(_signal(signal.SIGSTOP, lambda pids, _: [pids["driver"]], 2.0)),
    "all paused": Kind(_signal(signal.SIGSTOP, lambda pids, _: pids.values(), 4.0)),
    SCALED: Kind(_scale),
}


def inject(system: System, load: Load, kind: Kind, chance: random.Random) -> float:
    """One fault at a random moment; seconds until tokens flow again. Errors: HotcoldError."""
    pids: Pids = system.call("processes")
    time.sleep(chance.uniform(0.05, 0.5))
    began_s = time.monotonic()
    kind.do(system, pids, chance)
    over_s = time.monotonic() if kind.loses is not True else began_s
    harmed_s = over_s  # the last moment at which the system was not seen whole
    while not load.wrong:
        time.sleep(0.05)
        now = time.monotonic()
        if not serves(system):
            harmed_s = now
        first_s = load.first_after(harmed_s)
        # A service that was paused may be given up just as it goes on.
        if first_s is not None and (kind.loses is False or now - harmed_s > _SETTLED_S):
            return first_s - over_s
        if now - over_s > _LONGEST_S:
            break
    raise HotcoldError("; ".join(load.wrong) or "no token for long")


def serves(system: System) -> bool:
    """Whether all processes of a system run, and no service is being replaced."""
    processes: Pids = system.call("processes")
    over = psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED
    with suppress(psutil.NoSuchProcess):
        run = all(psutil.Process(pid).status() not in over for pid in processes.values())
        return run and not system.call("progress").stage.startswith("restarting")
    return False


@program
@click.option("--faults", type=click.IntRange(min=2), default=200)
@click.option("--exchange", type=click.Choice(["arena", "calls"]), default="arena")
@click.option("--seed", default=0)
@click.option("--minutes", type=float, default=math.inf, help="Fewer faults, if this is over.")
@click.option("--context", default=4096, help="Of the long generation.")
@click.option("--only", type=click.Choice(list(KINDS)), multiple=True, help="Only these kinds.")
@click.option("--model", help="The embedded model without it.")
@click.option("--resident", default=1.0, help="Neurons in memory, a share.")
def main(
    faults: int, exchange: str, seed: int, minutes: float, context: int, only: tuple[str, ...],
    model: str | None, resident: float,
) -> tuple[Json, str]:  # fmt: skip
    """Do a system harm while requests run, and compare what they answer."""
    # A system with neurons on storage refuses to be scaled.
    names = [name for name in only or KINDS if resident == 1 or name != SCALED]
    if not names:
        raise click.UsageError("a system with neurons on storage cannot be scaled")
    path, losses, mended_s = locate_model(model), deque[float](maxlen=_MAX_A_MINUTE), 0.0
    vocab = read_config(path).vocab_size
    config = SystemConfig(
        str(path), num_cpu_actors=2, num_threads=2, context_length=context,
        kv_positions=8 * context, exchange=exchange,
    )  # fmt: skip
    config = on_storage(config, resident) if resident < 1 else config
    report: Json = head(path, config.num_threads) | {"seed": seed, "faults": [], "wrong": []}
    report["right"], lines = {}, []
    with System.start(config) as system:
        for what, count in (("one long generation", 1), ("batch of eight", 8)):
            load, ends_s = (
                Load(system, requests_of(count, context, vocab)),
                time.monotonic() + 30 * minutes,
            )
            load.start()
            half = faults // 2
            for number in range(half) if count == 1 else range(half, faults):
                if time.monotonic() > ends_s or report["wrong"]:
                    break
                chance = random.Random(f"{seed} {number}")  # which repeats this fault alone
                name = chance.choice(names)
                for _ in range(KINDS[name].num_lost if KINDS[name].loses is not False else 0):
                    # What replacements took does not count in the system's minute.
                    while len(losses) == _MAX_A_MINUTE and (
                        time.monotonic() - mended_s - losses[0] < _A_MINUTE_S
                    ):
                        time.sleep(0.5)
                    losses.append(time.monotonic() - mended_s)
                try:
                    took_s = inject(system, load, KINDS[name], chance)
                except HotcoldError as error:
                    report["wrong"].append(f"fault {number}, {name}: {error}")
                    break
                mended_s += took_s
                report["faults"].append([what, name, number, took_s])
                progress(f"{number}, seed {seed}: {name}: {took_s:.2f} s")
            load.stop()
            if SCALED in names and not report["wrong"]:
                system.call("scale", 2)
            lent = leaks(system)
            report["wrong"] += [*load.wrong, *[f"still lent: {lent}"] * bool(lent)]
            report["right"][what] = load.num_right
            for name in names:
                took = [s for of, kind, _, s in report["faults"] if (of, kind) == (what, name)]
                if took:
                    seconds = f"{median(took):.2f}", f"{max(took):.2f}"
                    lines.append([what, name, len(took), load.num_right, *seconds])
    kept = f"; {resident:.0%} of the neurons in memory" if resident < 1 else ""
    columns = ("load", "fault", "faults", "answers as undisturbed", "median s", "worst s")
    text = heading(report, f"{path.name}, {len(report['faults'])} faults, seed {seed}{kept}")
    wrong = "".join(f"- {one}\n" for one in report["wrong"] or ["nothing was wrong or left lent"])
    return report, f"{text}{table(columns, lines)}\n{wrong}"


if __name__ == "__main__":
    main()
