"""Parts of messages: text, and in a line what a model of text is not given."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hotcold.ui.api.fields import StrictModel

# Kinds of parts, as several APIs call them -> what they are.
_KINDS = {
    "audio_url": "audio", "computer_screenshot": "image", "encrypted_content": "encrypted text",
    "file": "file", "image": "image", "image_url": "image", "input_audio": "audio",
    "input_file": "file", "input_image": "image", "video_url": "video",
}  # fmt: skip


class ContentPart(StrictModel):
    """Text; /v1/responses has other names for it."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Declined(StrictModel):
    """A part of an answer in which the model declined to answer."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class LeftOut(StrictModel):
    """A picture or the like: the model is told that it was there."""

    type: Literal[tuple(_KINDS)]  # type: ignore[valid-type]

    @property
    def text(self) -> str:
        """The line in its place."""
        return f"[{_KINDS[self.type]} left out]"


Content = str | Annotated[list[ContentPart | Declined | LeftOut], Field(fail_fast=True)]


def text_of(content: Content | None) -> str:
    """A message's text; what is left out has lines of its own."""
    if isinstance(content, str):
        return content
    text, was_text = "", True
    for part in content or ():
        is_text = not isinstance(part, LeftOut)
        if text and not (is_text and was_text) and not text.endswith("\n"):
            text += "\n"
        text, was_text = text + part.text, is_text
    return text
