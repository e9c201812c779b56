"""Ollama's `options` as fields of OpenAI's requests."""

from typing import Any

from hotcold.model.parameters import Biases, Kind, Number, Texts, Whole
from hotcold.model.sampling import PARAMETERS
from hotcold.ui.api.errors import ApiError

_MAX_TOKENS = (1 << 31) - 1
# OpenAI's fields of these names have other bounds, or count otherwise: here penalties are over the
# last tokens, the prompt's too.
_OTHER = ("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n")
# By Ollama's key: the parameter's name and kind.
_KNOWN = {one.ollama: (name, one.kind) for name, one in PARAMETERS.items() if one.ollama}
# Unsupported options that would change tokens, each with the value that has no effect.
_UNCHANGING = {"tfs_z": 1}
# Memory and speed, which the server's own options set. A prompt is never cut to num_ctx: a longer
# one than the context is refused. The last ones only matter with an option above.
_OWN = frozenset(
    ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap",
     "use_mlock", "low_vram", "f16_kv", "numa", "vocab_only", "logits_all", "embedding_only",
     "draft_num_predict", "penalize_newline")
)  # fmt: skip


def sampling_fields(options: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a `SamplingRequest`, and `max_tokens`, that `options` set as OpenAI's do.

    Errors:  ApiError 400 for an unknown name, which Ollama ignores; for a value of a wrong type;
             for an unsupported option that would change tokens
    """
    found: dict[str, Any] = {}
    for key, value in _given(options):
        if key in _KNOWN:
            name, kind = _KNOWN[key]
            if name not in _OTHER:
                found[name] = _typed(key, kind, value)
        elif key in _UNCHANGING:
            if _number(key, value) != _UNCHANGING[key]:
                raise _wrong(key, f"is not supported here; leave it out, or {_UNCHANGING[key]}")
        elif key not in _OWN:
            raise _wrong(ascii(key[:50]), "is not known here; leave it out")
    return _as_fields(found)


def other_fields(options: dict[str, Any] | None) -> dict[str, Any]:
    """The others, as fields of `SamplingParams`. Errors: ApiError 400 for a wrong type."""
    known = {key: found for key, found in _KNOWN.items() if found[0] in _OTHER}
    given = [(key, value) for key, value in _given(options) if key in known]
    return {known[key][0]: _typed(key, known[key][1], value) for key, value in given}


def _given(options: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in (options or {}).items() if value is not None]


def _as_fields(found: dict[str, Any]) -> dict[str, Any]:
    """In OpenAI's names and bounds; no limit, seed or top_k: left out."""
    if "max_tokens" in found:
        most = min(found.pop("max_tokens"), _MAX_TOKENS)
        found |= {"max_tokens": most} if most > 0 else {}
    if found.get("seed") == -1:
        del found["seed"]
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    return found


def _typed(key: str, kind: Kind, value: Any) -> Any:
    """The value as its kind; whole numbers may be written 3.0. Errors: ApiError 400."""
    match kind:
        case Whole():
            return int(_number(key, value))
        case Number():
            return float(_number(key, value))
        case Texts():
            return _texts(key, value)
        case Biases() if not isinstance(value, dict):
            raise _wrong(key, "must be an object of token ids and numbers")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "must be a number")
    if not abs(value) < 1e30:
        raise _wrong(name, "must be a finite number, and not as large")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise _wrong(name, "must be a list of texts")
    return value


def _wrong(name: str, text: str) -> ApiError:
    return ApiError(400, f"option {name} {text}", param=f"options.{name}")
