"""Answer a file of requests, as a job of a Ray cluster.

    ray job submit --working-dir . -- python -m hotcold.jobs.generate --requests /data/in.jsonl \
        --out /data/out.jsonl

As many requests run at once as the system lets (--parallel). A line of the requests is an object of
`id`, one of `prompt`, `messages` and `ids`, and perhaps `sampling` (`jobs/request_lines.py`). A
line of the answers has the request's `id` and what it gave, or an `error`; answers stand in the
order of the requests, and each is written as soon as its request and all before it have ended.
Requests stand in a file because a job's command line is public on the dashboard. A job runs in a
copy of the working directory: give absolute paths.

With --system NAME the job uses the cluster's running system of that name, or starts it: for itself
and for those who attach meanwhile, or with --keep until `python -m hotcold.jobs.stop --system
NAME`.
Without a name it uses, as `hotcold generate` does, one of the same model and options that this user
runs on this machine, kept or of `hotcold serve`; --own starts one of its own in any case.
"""

import hotcold.jobs.foreign_folder  # noqa: F401

# isort: split
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from hotcold.actors.protocol.messages import (
    Generation,
    SystemConfig,
    TokenEvent,
    TokenLogprob,
)
from hotcold.jobs.answer_file import AnswerFile
from hotcold.jobs.cli import run
from hotcold.jobs.cluster_system import job_system
from hotcold.jobs.request_lines import RequestLine, read_requests
from hotcold.jobs.running.find import find_system
from hotcold.jobs.running.in_flight import Connection, InFlight
from hotcold.jobs.support.options import own_option, split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import HotcoldError, ServiceError, UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.logprobs import MIN_LOGPROB

# Requests at the driver and answers that wait for an earlier one, for each that runs: so that one
# long answer does not leave the system idle. A job that is killed loses those that wait.
WINDOW = 8
_LINE_EVERY_S = 5.0

_Logprobs = list[TokenLogprob]
_Pending = tuple[RequestLine, Future[tuple[Generation, _Logprobs]]]


@click.command(cls=GroupedCommand)
@click.option("--requests", type=click.Path(path_type=Path), required=True, help="JSON lines.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines.")
@click.option("--resume", is_flag=True, help="Keep the answers in --out; skip their ids.")
@click.option("--model", help="A directory or org/repo; the embedded demo model without it.")
@click.option("--system", "name", help="The running system of that name, else start it so named.")
@click.option("--keep", is_flag=True, help="Leave a system that this job starts running.")
@own_option
@system_options
def generate(
    requests: Path,
    out: Path,
    resume: bool,
    model: str | None,
    name: str | None,
    keep: bool,
    is_own: bool,
    **values: Any,
) -> None:
    """Answer the requests of a file; to be submitted with `ray job submit`."""
    requests.open("rb").close()
    if out.exists() and out.samefile(requests):
        raise UsageError(f"--requests and --out are both {out}; name another file for the answers")
    options = split_system_options(values)
    with closing(AnswerFile(out, resume=resume)) as answers:
        started = time.monotonic()
        connection: Connection | None = None
        if not (name or keep):
            connection = find_system(model, options, 0.0, is_own, attends=True)
        if connection is None:
            connection = job_system(model, options, name, keep)
        with closing(InFlight(connection)) as in_flight:
            config = connection.config
            click.echo(f"ready after {time.monotonic() - started:.1f} s: {_told(config)}")
            answers.begin()
            lines = read_requests(requests, SamplingParams.defaults(config.model_path))
            try:
                counts = _serve(lines, answers, in_flight, config.max_batch)
            except ServiceError as error:
                raise _with_advice(error, name) from error
    click.echo(f"{counts} in {time.monotonic() - started:.1f} s, in {answers.path}")


def _told(config: SystemConfig) -> str:
    """A system in a line."""
    services = f"{config.num_cpu_actors} CPU service{'s' if config.num_cpu_actors > 1 else ''}"
    threads = f"{config.num_threads} thread{'s' if config.num_threads > 1 else ''}"
    model = Path(config.model_path).name
    return (
        f"{model}, mode {config.mode}, {services}, {threads}, {config.max_batch} requests at once"
    )


def _with_advice(error: ServiceError, name: str | None) -> ServiceError:
    """The error, and how to end a system that may outlive this job because it has a name."""
    if name is None:
        return error
    end = f"python -m hotcold.jobs.stop --system {name}"
    return ServiceError(f"{error}; if the system is still there, end it with `{end}`")


class _Counts:
    """How many lines were answered; shown every few seconds."""

    def __init__(self) -> None:
        self.answered = self.failed = self.skipped = 0
        self._shown = time.monotonic()

    def __str__(self) -> str:
        skipped = f", {self.skipped} were there already" if self.skipped else ""
        return f"{self.answered} requests answered, {self.failed} with an error{skipped}"

    def show(self) -> None:
        """Print a line if the last one is some time ago."""
        if time.monotonic() - self._shown > _LINE_EVERY_S:
            self._shown = time.monotonic()
            click.echo(self)


def _serve(
    lines: Iterator[RequestLine], answers: AnswerFile, in_flight: InFlight, max_batch: int
) -> _Counts:
    """Answer `lines`, and write the answers in their order.

    Errors:  ServiceError, OSError; running requests end then
    """
    counts = _Counts()
    pending: deque[_Pending] = deque()
    for line in lines:
        if answers.holds(_failure(line, line.error)):
            counts.skipped += 1
            continue
        pending.append((line, _answer(line, in_flight)))
        while pending and (pending[0][1].done() or len(pending) >= WINDOW * max_batch):
            _write_oldest(pending, answers, counts)
    while pending:
        _write_oldest(pending, answers, counts)
    return counts


def _answer(line: RequestLine, in_flight: InFlight) -> Future[tuple[Generation, _Logprobs]]:
    """What a line's request will give, and the logprobs of its tokens where they are wanted."""
    answer: Future[tuple[Generation, _Logprobs]] = Future()
    logprobs: _Logprobs = []

    def take(event: TokenEvent | BaseException) -> None:
        if isinstance(event, BaseException):
            answer.set_exception(event)
            return
        logprobs.extend(event.logprobs)
        if event.result is not None:
            answer.set_result((event.result, logprobs))

    if line.request is None:
        answer.set_exception(UsageError(line.error))
        return answer
    in_flight.start(line.request, take)
    return answer


def _write_oldest(pending: deque[_Pending], answers: AnswerFile, counts: _Counts) -> None:
    line, future = pending[0]
    try:
        result, logprobs = future.result()
        times = {
            "queued_s": result.queued_s,
            "prefill_s": result.prefill_s,
            "decode_s": result.decode_s,
        }
        scored = {"logprobs": list(map(_scored, logprobs))} if logprobs else {}
        answers.write({"id": line.request_id} | result.as_json() | times | scored)
        counts.answered += 1
    except ServiceError:  # not this request's fault: those after it would fare no better
        raise
    except HotcoldError as problem:
        answers.write(_failure(line, problem))
        counts.failed += 1
    pending.popleft()
    counts.show()


def _scored(token: TokenLogprob) -> dict[str, Any]:
    top = [[token_id, max(logprob, MIN_LOGPROB)] for token_id, logprob in token.top]
    return {"id": token.token_id, "logprob": max(token.logprob or 0.0, MIN_LOGPROB), "top": top}


def _failure(line: RequestLine, problem: object) -> dict[str, Any]:
    return {"id": line.request_id, "error": line.failure(problem)}


if __name__ == "__main__":
    run(command=generate, program="python -m hotcold.jobs.generate")
