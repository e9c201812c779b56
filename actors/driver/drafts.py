"""Drafts: tokens that may follow a request's, proposed cheaply and verified by the model.

A draft is never part of `request.tokens`. The step that verifies it computes the last token and the
draft's at once, and keeps those that the request itself would have chosen; so drafts change how
fast an answer comes, and nothing else.
"""

from collections.abc import Sequence
from typing import Protocol

from hotcold.actors.driver.active_request import ActiveRequest


class Drafter(Protocol):
    """Proposes tokens, in the engine's thread, between two steps."""

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """At most counts[i] ids (>= 1) that may follow `requests[i].tokens`; [] for no draft.

        Of each request all tokens but the last one are in the KV cache, and its slot has pages for
        len(tokens) + counts[i] positions. A drafter may write rows of the KV cache at positions
        >= num_done: the step that follows writes them again. It leaves tokens and `num_done` alone.
        Errors:  those of `Engine.step`
        """
        ...
