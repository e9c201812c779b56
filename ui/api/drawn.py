"""How tokens are drawn: fields of requests and Ollama's options, of `model.sampling.PARAMETERS`."""

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
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import CHANGING, Request, changes_nothing

_MAX_STOP_IDS = 64
_MAX_BIASES = 1024

_BY_OLLAMAS = {one.ollama: (name, one.kind) for name, one in PARAMETERS.items() if one.ollama}
# Memory and speed, which the server's own options set. A prompt is never cut to num_ctx: a longer
# one than the context is refused. The last ones only matter with an option above.
_OLLAMAS_OWN = frozenset(
    ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap",
     "use_mlock", "low_vram", "f16_kv", "numa", "vocab_only", "logits_all", "embedding_only",
     "draft_num_predict", "penalize_newline")
)  # fmt: skip

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


def ollamas_sampling(options: dict[str, Any] | None) -> dict[str, Any]:
    """Ollama's `options` as fields of `SamplingParams`; no limit or seed: left out.

    Penalties are over the last tokens, the prompt's too, as in Ollama.
    Errors:  ApiError 400 for an unknown name, which Ollama ignores; for a wrong value; for an
             unsupported option that would change tokens
    """
    found: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key in _BY_OLLAMAS and value is not None:
            name, kind = _BY_OLLAMAS[key]
            found[name] = _of_ollama(key, kind, value)
        elif not (key in _OLLAMAS_OWN or changes_nothing(key, value)):
            known = f"{key} is not supported" if key in CHANGING else f"{key[:50]!a} is not known"
            raise ApiError(400, f"option {known} here; leave it out", param="options")
    return {name: value for name, value in found.items() if value is not None}


def _of_ollama(key: str, kind: Kind, value: Any) -> Any:
    """An option's value, None for none; whole numbers may be written 3.0. Errors: ApiError 400."""
    if isinstance(kind, Whole) and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and key == "num_predict":  # below 1 it is no limit
        return min(value, (1 << 31) - 1) if value > 0 else None
    if type(value) is int and key == "seed":
        return None if value == -1 else value & LARGEST_SEED
    if type(value) is int and key == "top_k":
        value = max(value, 0)
    value = kind.kept(value)
    try:
        kind.check(f"option {key}", value)
    except UsageError as error:
        raise ApiError(400, str(error), param=f"options.{key}") from None
    return value
