"""Fields of requests that say how tokens are drawn: those of `model.sampling.PARAMETERS`."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, create_model

from hotcold.model.errors import UsageError
from hotcold.model.parameters import (
    LARGEST_SEED,
    Biases,
    Kind,
    Number,
    Switch,
    Texts,
    TokenIds,
    Whole,
)
from hotcold.model.sampling import PARAMETERS, SamplingParams
from hotcold.ui.api.fields import Request

_MAX_STOP_IDS = 64
_MAX_BIASES = 1024

# Lists stop at the first wrong item: each would be an error otherwise.
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_StopText = Annotated[str, Field(min_length=1, max_length=Texts.most_characters)]
_StopTexts = Annotated[list[_StopText], Field(max_length=Texts.most, fail_fast=True)]


def _are_biases(given: dict[str, Any]) -> dict[str, Any]:
    kind = Biases()
    try:
        kind.check("logit_bias", kind.kept(given))
    except UsageError:
        raise ValueError(f"must hold {kind.wanted}") from None
    return given


def _values(kind: Kind) -> Any:
    """The type of a field of that kind; whole numbers end before a power of two."""
    match kind:
        case Whole(low, high):
            return Annotated[int, Field(ge=low, lt=high)]
        case Number(low, high, above=True):
            return Annotated[float, Field(gt=low, le=high)]
        case Number(low, high):
            return Annotated[float, Field(ge=low, le=high)]
        case Switch():
            return bool
        case Texts():
            return _StopText | _StopTexts
        case TokenIds():
            return Annotated[list[TokenId], Field(max_length=_MAX_STOP_IDS, fail_fast=True)]
        case Biases():
            biases = Annotated[dict[str, Any], Field(max_length=_MAX_BIASES)]
            return Annotated[biases, AfterValidator(_are_biases)]
    raise TypeError(f"no field of HTTP is of {kind}")


FIELDS = tuple(name for name, one in PARAMETERS.items() if one.http is not None)
if TYPE_CHECKING:
    _Fields = Request
else:
    _TYPES = {name: (_values(PARAMETERS[name].http) | None, None) for name in FIELDS}
    _Fields = create_model("_Fields", __base__=Request, **_TYPES)


class Drawn(_Fields):
    """A request with a field for each parameter. A missing value is the model's default."""

    def drawn(self) -> dict[str, Any]:
        """The values of the fields."""
        return {name: getattr(self, name) for name in FIELDS}

    def sampling(self, max_tokens: int | None, defaults: SamplingParams) -> SamplingParams:
        """The sampling; `defaults` are the model's own. Errors: UsageError."""
        values = {**self.drawn(), "max_tokens": max_tokens}
        if values["seed"] is not None:
            values["seed"] &= LARGEST_SEED
        return SamplingParams.of_given(values, defaults)
