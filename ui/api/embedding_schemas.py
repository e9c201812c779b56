"""What POST /v1/embeddings may hold."""

from typing import Any, Literal

from pydantic import Field, field_validator

from hotcold.ui.api.fields import Request
from hotcold.ui.api.schemas import Prompt, prompts_of


class EmbeddingsRequest(Request):
    """POST /v1/embeddings: a text, or token ids, or several of them."""

    input: Prompt = Field(union_mode="left_to_right")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @field_validator("dimensions", mode="before")
    @classmethod
    def _not_chosen(cls, given: Any) -> None:
        if given is not None:
            raise ValueError(
                "a vector has as many numbers as the model's hidden states; leave it out"
            )

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input, a text or token ids."""
        return prompts_of(self.input)
