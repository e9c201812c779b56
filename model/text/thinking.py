"""Models that think before they answer: how they write what they think."""

from __future__ import annotations

from typing import NamedTuple


class Thinking(NamedTuple):
    """What stands around a model's thoughts, which are the beginning of its answer."""

    begin: str
    end: str


# A model writes them as its chat template does: the first of these that stands there. A family that
# has channels instead is one more: all from the channel of its thoughts to that of its answer.
_WAYS = (
    Thinking("<think>", "</think>"),  # DeepSeek R1, Qwen 3, SmolLM 3, GLM 4.5
    Thinking("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thinking("[THINK]", "[/THINK]"),  # Magistral
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)


def thinking_of(template: str) -> Thinking | None:
    """How the model of a chat template thinks, or None where it does not."""
    return next((way for way in _WAYS if way.begin in template or way.end in template), None)
