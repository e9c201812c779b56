"""The answers that a profile of a mixture lets the model write itself.

How soon experts are chosen again is another thing in a text than in what the model writes: where it
leaves a subject sooner, half of the experts in memory miss twice as many of its choices. What is
decoded are answers, so these are counted, and their beginnings, where a new prompt has taken other
experts into memory, count as often as they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.system import System
from hotcold.model.sampling import SamplingParams

_PROMPT, _ANSWER = 16, 128  # tokens
_MAX_ANSWERS = 8


@dataclass(frozen=True)
class Answers:
    """Answers to places spread over a text: `num_prompt` of its tokens each, then `num_tokens`."""

    count: int
    num_prompt: int
    num_tokens: int

    @classmethod
    def of(cls, num_ids: int, window_ids: int) -> Answers:
        """To a text of so many ids; with their prompts they are no longer than a window."""
        if window_ids < 2:
            return cls(0, 0, 0)
        num_prompt = min(_PROMPT, num_ids, window_ids // 2)
        count = min(_MAX_ANSWERS, num_ids // num_prompt)
        return cls(count, num_prompt, min(_ANSWER, window_ids - num_prompt))

    @property
    def window_ids(self) -> int:
        """Ids of a prompt and its answer."""
        return self.num_prompt + self.num_tokens

    def profile(self, running: System, ids: list[int], number: int, bos_id: int | None) -> None:
        """Let the model write answer `number` to a text; its neurons and experts are counted.

        It is drawn at temperature 1 from the tokens that `SamplingParams` keeps: the likeliest
        alone soon repeat themselves.
        Errors:  as of `System.complete` and `Driver.profile_window`
        """
        first = (len(ids) - self.num_prompt) * number // self.count
        prompt = ids[first : first + self.num_prompt]
        opening = [] if bos_id is None else [bos_id]
        sampling = SamplingParams(
            max_tokens=self.num_tokens, temperature=1.0, seed=number, ignore_eos=True
        )
        request = GenerateRequest(sampling, prompt_ids=opening + prompt, use_cache=False)
        answer = running.complete(request).ids
        running.call("profile_window", prompt + answer, [], self.num_prompt)


NO_ANSWERS = Answers(0, 0, 0)
