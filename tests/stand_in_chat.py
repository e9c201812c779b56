"""A conversation with a system that answers as a test says; run it to have one at a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.jobs.chat.conversation import Conversation, Facts
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.chat.session import Session, Settings
from hotcold.model.errors import PromptError
from hotcold.model.sampling import SamplingParams

FACTS = Facts("words", "exact", "cpu", 1000)
NUM_ASKED = 10  # tokens of a prompt, as the system counts it
ANSWER = """# A title

Some **bold** words and a <tag>.

```python
def f(x):
    return x
```

1. one
2. two
"""


class StandIn:
    """Answers with what was asked last, in pieces; some questions are special.

    "cut" is answered up to a length, "full" up to the context's end; "endless" until it is
    cancelled.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        self.requests: list[GenerateRequest] = []
        self._pause_s = pause_s
        self._cancelled = threading.Event()

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        self._cancelled.clear()
        self.requests.append(request)
        question = (request.messages or [])[-1]["content"]
        if question == "too much":
            raise PromptError("the prompt has 1001 tokens, the context holds 1000")
        if question == "endless":
            while not self._cancelled.wait(0.02):
                yield TokenEvent("w ", None, 1, num_prompt_tokens=NUM_ASKED)
            return
        text = ANSWER if question == "markdown" else f"echo of {question}"
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        num_asked = FACTS.context_length - len(pieces) if question == "full" else NUM_ASKED
        for piece in pieces:
            time.sleep(self._pause_s * (1 + 20 * question.startswith("slow")))
            yield TokenEvent(piece, None, 1, num_prompt_tokens=num_asked)
        ids = list(range(len(pieces)))
        times = {"attention": 0.5, "ffn": 1.5, "python": 0.0, "total": 2.0}
        reason = "length" if question in ("cut", "full") else "stop"
        result = Generation(text, ids, reason, num_asked, 0.1, 0.2, per_token_ms=times)
        yield TokenEvent("", result, 0, num_prompt_tokens=num_asked)

    def cancel(self, request_id: str) -> None:
        assert request_id == self.requests[-1].request_id
        self._cancelled.set()


def conversation(running: StandIn | None = None) -> Conversation:
    return Conversation(running or StandIn(), FACTS, SamplingParams())


def main() -> None:
    talk, settings = conversation(StandIn(0.005)), Settings()
    screen: Screen
    if "plain" in sys.argv:
        screen = Screen()
    else:
        from hotcold.jobs.chat.terminal import TerminalScreen

        screen = TerminalScreen(talk, settings)
    Session(talk, screen, settings).run()


if __name__ == "__main__":
    main()
