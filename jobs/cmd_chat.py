"""`hotcold chat`: a conversation in the terminal, by the model's chat template."""

import contextlib
import sys
from typing import Any

import click

from actors.messages import GenerateRequest
from actors.preflight import prepare_system
from actors.prompts import Prompts
from actors.system import System
from jobs.loading import running_system
from jobs.options import sampling_options, split_sampling, split_system_options, system_options
from model.errors import PromptError
from model.locate import locate_model
from model.sampling import SamplingParams

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command()
@click.argument("model", required=False)
@click.option("--system", "system_prompt", help="What the model is told before the conversation.")
@sampling_options
@system_options
def chat(model: str | None, system_prompt: str | None, **values: Any) -> None:
    """Talk with MODEL (the embedded demo model without it)."""
    path = locate_model(model)
    system, config = prepare_system(path, split_system_options(values))
    prompts = Prompts(path, config, system.context_length)
    if prompts.tokenizer is None or not prompts.tokenizer.has_chat_template:
        raise PromptError(f"{path.name} has no tokenizer with a chat template; use generate")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    with running_system(system) as running:
        click.echo(_HELP, err=True)
        _Conversation(running, split_sampling(path, values), system_prompt).run()


class _Conversation:
    def __init__(self, running: System, sampling: SamplingParams, system_prompt: str | None):
        self._running = running
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._opening)

    def run(self) -> None:
        """Read lines and answer them until the input ends."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                click.echo(_HELP, err=True)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = ""
        stream = self._running.generate(GenerateRequest(self._sampling, messages=messages))
        try:
            for event in stream:
                answer += event.text
                click.echo(event.text, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]
        except PromptError as error:  # the conversation has outgrown the context
            click.echo(f"{error}; /reset starts anew", err=True)
            return
        click.echo()
        self._messages = [*messages, {"role": "assistant", "content": answer}]
