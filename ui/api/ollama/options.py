"""Ollama's `options` as fields of OpenAI's requests."""

from typing import Any

from hotcold.ui.api.errors import ApiError

_MAX_TOKENS = (1 << 31) - 1
_WHOLE = ("num_predict", "top_k", "seed")
_NUMBERS = ("temperature", "top_p", "min_p")
# Unsupported options that would change tokens, each with the value that has no effect.
_UNCHANGING = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
# Over the last tokens, the prompt's too; OpenAI's fields of these names count otherwise.
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_WINDOW = "repeat_last_n"
# Memory and speed, which the server's own options set. A prompt is never cut to num_ctx: a longer
# one than the context is refused. The last ones only matter with an option above.
_OWN = frozenset(
    ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap",
     "use_mlock", "low_vram", "f16_kv", "numa", "vocab_only", "logits_all", "embedding_only",
     "draft_num_predict", "mirostat_eta", "mirostat_tau", "penalize_newline")
)  # fmt: skip


def sampling_fields(options: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a `SamplingRequest`, and `max_tokens`, that `options` set.

    Errors:  ApiError 400 for an unknown name, which Ollama ignores; for a value of a wrong type;
             for an unsupported option that would change tokens
    """
    found: dict[str, Any] = {}
    for name, value in _given(options):
        if name in _WHOLE:
            found[name] = int(_number(name, value))
        elif name in _NUMBERS:
            found[name] = float(_number(name, value))
        elif name == "stop":
            found[name] = _texts(name, value)
        elif name in _UNCHANGING:
            if _number(name, value) != _UNCHANGING[name]:
                raise _wrong(name, f"is not supported here; leave it out, or {_UNCHANGING[name]}")
        elif name not in _OWN and name not in (*_PENALTIES, _WINDOW):
            raise _wrong(ascii(name[:50]), "is not known here; leave it out")
    return _as_fields(found)


def penalty_fields(options: dict[str, Any] | None) -> dict[str, Any]:
    """The penalties, as fields of `SamplingParams`. Errors: ApiError 400 for a wrong type."""
    return {
        name: int(_number(name, value)) if name == _WINDOW else float(_number(name, value))
        for name, value in _given(options)
        if name in (*_PENALTIES, _WINDOW)
    }


def _given(options: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in (options or {}).items() if value is not None]


def _as_fields(found: dict[str, Any]) -> dict[str, Any]:
    """In OpenAI's names and bounds; no limit, seed or top_k: left out."""
    num_predict = found.pop("num_predict", 0)
    if num_predict > 0:
        found["max_tokens"] = min(num_predict, _MAX_TOKENS)
    if found.get("seed") == -1:
        del found["seed"]
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    return found


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
