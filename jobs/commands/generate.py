"""`hotcold generate`: continue a prompt, streaming to the terminal.

Imports little: where a system runs already, the command is over before more were imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hotcold.actors.protocol.messages import GenerateRequest, Generation
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.running.client import GoneError
from hotcold.jobs.running.find import find_system
from hotcold.jobs.running.in_flight import Connection, InFlight
from hotcold.jobs.support.console import cut_short, json_option, tell, what_it_took
from hotcold.jobs.support.options import (
    TOKEN_IDS,
    kept_options,
    sampling_options,
    split_sampling,
    split_system_options,
    system_options,
)
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.jobs.support.workers import begin_workers
from hotcold.model.errors import PromptError, ServiceError, require_nonempty
from hotcold.model.files.locate import locate_model
from hotcold.model.sampling import SamplingParams

_LONGER = "a larger --max-tokens lets it be longer"


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--prompt", help="Text to continue; read from standard input without it.")
@click.option("--prompt-ids", type=TOKEN_IDS, help="Token ids to continue, like 1,2,3.")
@click.option("--chat", is_flag=True, help="The prompt is a question: use the chat template.")
@sampling_options
@system_options
@kept_options
@json_option
def generate(
    model: str | None,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: bool,
    **values: Any,
) -> dict[str, Any]:
    """Continue a prompt with MODEL (the embedded demo model without it)."""

    def request(sampling: SamplingParams) -> GenerateRequest:
        return _request(prompt, prompt_ids, chat, sampling)

    return answer(model, request, **values)


def answer(
    model: str | None,
    request_of: Callable[[SamplingParams], GenerateRequest],
    keep_s: float,
    is_own: bool,
    **values: Any,
) -> dict[str, Any]:
    """Show an answer, and then what it took, and return that.

    `values` are of system and sampling options.

    Errors:  HotcoldError
    """
    options = split_system_options(values)
    kept = find_system(model, options, keep_s, is_own)
    path = locate_model(model) if kept is None else kept.model_path
    asked = request_of(split_sampling(path, values))
    if kept is None:
        result, about = _answer_here(path, options, asked)
    else:
        try:
            result, about = _answer(kept, asked), kept.facts
        except GoneError:
            click.echo("it has just ended, so this command starts its own", err=True)
            result, about = _answer_here(path, options, asked)
    _show_end(result, about)
    return result.as_json() | {"system": about["system"]}


def _answer_here(
    path: Path, options: SystemOptions, asked: GenerateRequest
) -> tuple[Generation, dict[str, Any]]:
    """Answer with a system of this command's own; also what is said of that system."""
    begin_workers()
    from hotcold.actors.driver.prompts import Prompts
    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.running.own import start_prepared

    system, config = prepare_system(path, options)
    prompts = Prompts(path, config, system.context_length)
    request = prompts.checked(asked)
    connection = start_prepared(system)
    about = {
        "system": asdict(connection.config),  # with --mode auto, the mode that was chosen
        "num_neurons": config.num_neurons,
        "max_positions": config.max_positions,
        "has_text": prompts.tokenizer is not None,
    }
    return _answer(connection, request), about


def _answer(connection: Connection, request: GenerateRequest) -> Generation:
    """Show the answer as it comes. Errors: GoneError of a system that has ended before it."""
    with closing(InFlight(connection)) as requests:
        for event in requests.events(request):
            tell(event.readable, nl=False)
            if event.result is not None:
                return event.result
    raise ServiceError("the answer ended without a result")


def _request(
    prompt: str | None, prompt_ids: list[int] | None, chat: bool, sampling: Any
) -> GenerateRequest:
    if prompt is not None and prompt_ids is not None:
        raise PromptError("--prompt and --prompt-ids were both given; leave one out")
    if prompt_ids is not None and chat:
        raise PromptError("--chat asks a question in text; give --prompt, not --prompt-ids")
    if prompt_ids is not None:
        return GenerateRequest(sampling, prompt_ids=prompt_ids)
    if prompt is None:
        prompt = read_prompt()
    require_nonempty(prompt)
    if chat:
        return GenerateRequest(sampling, messages=[{"role": "user", "content": prompt}])
    return GenerateRequest(sampling, prompt=prompt)


def read_prompt() -> str:
    """All of standard input. Errors: PromptError."""
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("there is no prompt; give --prompt TEXT or --prompt-ids 1,2,3")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise PromptError("the prompt is no valid Unicode text; give it in UTF-8") from None


def _show_end(result: Generation, about: dict[str, Any]) -> None:
    if not about["has_text"]:
        click.echo(",".join(map(str, result.ids)), nl=False)
    click.echo()
    neurons = f"{about['num_neurons']} neurons"
    click.echo(what_it_took(result, neurons, _first_rows(result)), err=True)
    positions = about["system"]["context_length"], about["max_positions"]
    if cut := cut_short(result, *positions, _LONGER):
        click.echo(cut, err=True)


def _first_rows(result: Generation) -> str:
    """Said of rows that were read of more neurons: up where a threshold came after it, gates where
    a predictor chose them.
    """
    ups, gates = result.ups_computed, result.gates_computed
    text = f", {ups:.1%} of their ups" if ups > result.neurons_computed else ""
    return f"{text}, {gates:.1%} of their gates" if gates < 1 else text
