"""`hotcold generate`: continue a prompt, streaming to the terminal."""

import sys
from dataclasses import asdict
from typing import Any

import click

from actors.driver.text.prompts import Prompts, require_something
from actors.protocol.messages import GenerateRequest, Generation
from actors.setup.preflight import prepare_system
from jobs.settings.shared_option import GroupedCommand
from jobs.support.console import json_option, print_json
from jobs.support.loading import running_system
from jobs.support.options import (
    TokenIds,
    sampling_options,
    split_sampling,
    split_system_options,
    system_options,
)
from model.errors import PromptError
from model.files.locate import locate_model


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--prompt", help="Text to continue; read from standard input without it.")
@click.option("--prompt-ids", type=TokenIds(), help="Token ids to continue, like 1,2,3.")
@click.option("--chat", is_flag=True, help="The prompt is a question: use the chat template.")
@sampling_options
@system_options
@json_option
def generate(
    model: str | None,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Continue a prompt with MODEL (the embedded demo model without it)."""
    path = locate_model(model)
    options = split_system_options(values)
    system, config = prepare_system(path, options)
    request = _request(prompt, prompt_ids, chat, split_sampling(path, values))
    prompts = Prompts(path, config, system.context_length)
    request = prompts.checked(request)
    with running_system(system) as running:
        for event in running.generate(request):
            click.echo(event.text, nl=False)
            sys.stdout.flush()
            if event.result is not None:
                result = event.result
        system = running.call("describe")  # with --mode auto, the mode that was chosen
    _show_end(result, config.ffn_size * config.num_layers, prompts.tokenizer is not None)
    if as_json:
        print_json(result.as_json() | {"system": asdict(system)})


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
        prompt = _read_prompt()
    require_something(prompt)
    if chat:
        return GenerateRequest(sampling, messages=[{"role": "user", "content": prompt}])
    return GenerateRequest(sampling, prompt=prompt)


def _read_prompt() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("there is no prompt; give --prompt TEXT or --prompt-ids 1,2,3")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise PromptError("the prompt is no valid Unicode text; give it in UTF-8") from None


def _show_end(result: Generation, num_neurons: int, has_text: bool) -> None:
    if not has_text:
        click.echo(",".join(map(str, result.ids)), nl=False)
    click.echo()
    click.echo(
        f"[{len(result.ids)} tokens, {result.finish_reason}; prefill "
        f"{result.prefill_tokens_per_s:.1f} tokens/s, decode {result.decode_tokens_per_s:.1f} "
        f"tokens/s, {result.neurons_computed:.1%} of {num_neurons} neurons computed"
        f"{_first_rows(result)}]",
        err=True,
    )


def _first_rows(result: Generation) -> str:
    """Said of rows that were read of more neurons: up where a threshold came after it, gates where
    a predictor chose them.
    """
    ups, gates = result.ups_computed, result.gates_computed
    text = f", {ups:.1%} of their ups" if ups > result.neurons_computed else ""
    return f"{text}, {gates:.1%} of their gates" if gates < 1 else text
