"""`hotcold run`: a conversation, or the answer to one prompt, as Ollama's command of that name."""

from __future__ import annotations

import sys
from typing import Any

import click

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.jobs.commands.chat import chat_options, talk
from hotcold.jobs.commands.generate import answer, read_prompt
from hotcold.jobs.support.console import json_option, wants_json
from hotcold.jobs.support.options import kept_options, sampling_options, system_options
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import require_nonempty
from hotcold.model.sampling import SamplingParams


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.argument("prompt", nargs=-1)
@chat_options
@sampling_options
@system_options
@kept_options
@json_option
def run(
    model: str | None,
    prompt: tuple[str, ...],
    system_prompt: str | None,
    no_history: bool,
    plain: bool,
    **values: Any,
) -> dict[str, Any] | None:
    """Talk with MODEL (the embedded demo model without it), or answer PROMPT.

    What is piped in is the prompt, too, behind PROMPT where both are given. MODEL is fetched if it
    is not here; a known name such as qwen3:8b will do.
    """
    text = " ".join(prompt)
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed and not text and not wants_json():
        talk(model, system_prompt, no_history, plain, **values)
        return None

    def request(sampling: SamplingParams) -> GenerateRequest:
        piped = "" if is_typed or sys.stdin is None else read_prompt()
        question = "\n\n".join(part for part in (text, piped.strip()) if part)
        require_nonempty(question)
        opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return GenerateRequest(sampling, messages=[*opening, {"role": "user", "content": question}])

    return answer(model, request, **values)
