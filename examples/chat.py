"""A conversation in the terminal, each answer as it comes: `python chat.py [MODEL]`."""

import sys
from typing import Any

from hotcold import LLM, PromptError


def main(model: str | None = None) -> None:
    """Answer lines of standard input until it ends."""
    messages: list[dict[str, Any]] = []
    with LLM(model) as llm:
        while question := read():
            messages.append({"role": "user", "content": question})
            try:
                for piece in llm.stream(messages):
                    print(piece.text, end="", flush=True)
                    if piece.output is not None:
                        messages.append(piece.output.message)
            except PromptError as problem:  # the conversation has outgrown the context
                print(problem)
                messages.clear()
            print()


def read() -> str:
    """A line that is typed; "" at the end."""
    try:
        return input("> ")
    except EOFError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
