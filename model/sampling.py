"""The sampling parameters of a request, each declared once; a model's own. A kernel draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotcold.model.config.json_reader import ConfigReader, read_json_object
from hotcold.model.errors import UsageError, shown
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.parameters import (
    LARGEST_SEED,
    Biases,
    Kind,
    Number,
    Parameter,
    Switch,
    Texts,
    TokenIds,
    Whole,
)

if TYPE_CHECKING:
    from hotcold.model.config.model_config import ModelConfig

GENERATION_CONFIG = "generation_config.json"


def _parameter(
    default: Any,
    kind: Kind,
    about: str = "",
    http: Kind | bool = True,
    ollama: str = "",
    is_models: bool = False,
) -> Any:
    """A field of `SamplingParams`; `http` True: the values are the same there."""
    of_http = (kind if http else None) if isinstance(http, bool) else http
    one = Parameter(default, kind, about, of_http, ollama, is_models)
    return field(default=default, metadata={"parameter": one})


_MANY = 1 << 31
_ANY_REPEAT = Number(0.0, 100.0, above=True)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the defaults are llama.cpp's.

    First `logit_bias`, pairs of a token id and a number, is added to logits. Then the penalties
    lower the logits of the last `repeat_last_n` tokens (-1: all) of prompt and answer; presence and
    frequency penalties of the answer alone without `penalize_prompt`. `repeat_penalty` 1 and the
    others 0 change nothing. DRY then lowers those of tokens that would go on with a repetition.
    Then top_n_sigma, top_k, typical_p, top_p, min_p and XTC filter, in this order, or `mirostat`
    does in their place; `top_k` 0 keeps all tokens, and `temperature` 0 takes the most likely one.
    top_p and min_p compare probabilities at the temperature, typical_p and XTC before it.
    Generation ends after `max_tokens` (None: with the context), and from `min_tokens` on at a
    `stop` text, at one of `stop_token_ids`, or at an end token unless `ignore_eos`. The answer
    includes these only with `include_stop_str_in_output`.

    Texts and ids stop the answer of a chat, not the thoughts before it. Thoughts end after
    `thinking_token_budget` tokens (-1: when the model ends them), or with an end token: the mark
    that ends them is written then, and at least a word of the answer.

    Each parameter is declared here alone: `PARAMETERS` is what the command line, HTTP, Ollama's
    API and the page read.
    Errors:  UsageError naming the value that is out of range
    """

    # fmt: off
    max_tokens: int | None = _parameter(
        None, Whole(1, _MANY, or_none=True), "Longest answer; to the end of the context without "
        "it.", http=False, ollama="num_predict")
    temperature: float = _parameter(
        0.8, Number(0.0, 100.0), "0 takes the likeliest token every time.",
        http=Number(0.0, 2.0), ollama="temperature", is_models=True)
    top_k: int = _parameter(
        40, Whole(0, _MANY, or_minus=True), "Choose among so many likeliest tokens; 0: all.",
        http=Whole(-1, _MANY), ollama="top_k", is_models=True)
    top_p: float = _parameter(
        0.95, Number(0.0, 1.0), "Choose among those that hold so much probability.",
        ollama="top_p", is_models=True)
    min_p: float = _parameter(
        0.05, Number(0.0, 1.0), "Leave out those so much less likely than the first.",
        ollama="min_p", is_models=True)
    top_n_sigma: float = _parameter(
        -1.0, Number(-1.0, 100.0), "Leave out logits so many standard deviations below the "
        "largest; 0 or less: none.", ollama="top_n_sigma")
    typical_p: float = _parameter(
        1.0, Number(0.0, 1.0), "Choose among the most typical tokens that hold so much "
        "probability; 1: all.", ollama="typical_p", is_models=True)
    xtc_probability: float = _parameter(
        0.0, Number(0.0, 1.0), "How often the likeliest tokens are left out (XTC); 0: never.",
        ollama="xtc_probability")
    xtc_threshold: float = _parameter(
        0.1, Number(0.0, 1.0), "XTC: those at least so probable, but one; above 0.5: none.",
        ollama="xtc_threshold")
    mirostat: int = _parameter(
        0, Whole(0, 2), "Mirostat's version, instead of these filters; 0: not.",
        http=Whole(0, 3), ollama="mirostat")
    mirostat_tau: float = _parameter(
        5.0, Number(0.0, 100.0), "The surprise that Mirostat aims at, in bits a token.",
        ollama="mirostat_tau")
    mirostat_eta: float = _parameter(
        0.1, Number(0.0, 100.0), "How fast Mirostat follows it.", ollama="mirostat_eta")
    seed: int | None = _parameter(
        None, Whole(0, LARGEST_SEED, or_none=True), "The same seed gives the same text.",
        http=Whole(-(1 << 63), 1 << 63), ollama="seed")
    stop: Sequence[str] = _parameter(
        (), Texts(), "End before this text; may be given several times.", ollama="stop")
    ignore_eos: bool = _parameter(False, Switch(), "Go on after an end token.")
    repeat_penalty: float = _parameter(
        1.0, Number(0.01, 100.0), "Divide the logits of the last tokens by this, llama.cpp's; 1: "
        "not.", http=_ANY_REPEAT, ollama="repeat_penalty")
    presence_penalty: float = _parameter(
        0.0, Number(-100.0, 100.0), "Taken off the logits of the answer's tokens.",
        http=Number(-2.0, 2.0), ollama="presence_penalty")
    frequency_penalty: float = _parameter(
        0.0, Number(-100.0, 100.0), "The same, for each time that a token stands there.",
        http=Number(-2.0, 2.0), ollama="frequency_penalty")
    repeat_last_n: int = _parameter(
        64, Whole(-1, _MANY), "What penalties count: so many last tokens of prompt and answer; -1: "
        "all.", ollama="repeat_last_n")
    dry_multiplier: float = _parameter(
        0.0, Number(0.0, 100.0), "Take so much off the logit of a token that would repeat a "
        "sequence (DRY); 0: not.", ollama="dry_multiplier")
    dry_base: float = _parameter(
        1.75, Number(1.0, 100.0), "DRY: times this for each token that the sequence is longer.",
        ollama="dry_base")
    dry_allowed_length: int = _parameter(
        2, Whole(0, _MANY), "DRY: from sequences of so many tokens on.",
        ollama="dry_allowed_length")
    dry_penalty_last_n: int = _parameter(
        -1, Whole(-1, _MANY), "DRY: among so many last tokens of prompt and answer; -1: all.",
        ollama="dry_penalty_last_n")
    dry_sequence_breakers: Sequence[str] = _parameter(
        ("\n", ":", '"', "*"), Texts(), "DRY: no sequence goes beyond this text; may be given "
        "several times.", ollama="dry_sequence_breakers")
    penalize_prompt: bool = _parameter(True, Switch(), http=False)
    stop_token_ids: Sequence[int] = _parameter((), TokenIds())
    min_tokens: int = _parameter(0, Whole(0, _MANY))
    thinking_token_budget: int = _parameter(
        -1, Whole(-1, _MANY), "Most tokens that the model thinks before it answers; -1: any.",
        ollama="thinking_token_budget")
    include_stop_str_in_output: bool = _parameter(False, Switch())
    logit_bias: Sequence[tuple[int, float]] | Mapping[int, float] = _parameter(
        (), Biases(), "Add to a token's logit, like 1234=-5; may be given several times.",
        ollama="logit_bias")

    # fmt: on
    def __post_init__(self) -> None:
        for one in fields(SamplingParams):
            kind: Kind = one.metadata["parameter"].kind
            object.__setattr__(self, one.name, kind.kept(getattr(self, one.name)))
        for one in fields(SamplingParams):
            kind = one.metadata["parameter"].kind
            if one.name == "min_tokens" and self.max_tokens is not None:
                kind = Whole(0, self.max_tokens)
            kind.check(one.name, getattr(self, one.name))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @classmethod
    def defaults(cls, path: str | Path) -> SamplingParams:
        """Return the options in the model's generation_config.json, and defaults for others.

        A GGUF file has them in its metadata (general.sampling.*). Where the JSON has do_sample the
        defaults are transformers': greedy for false, temperature 1 and top_k 50 for true.
        Errors:  ConfigError for a malformed file
        """
        if is_gguf(path):
            return cls(**_of_metadata(path))
        file = Path(path) / GENERATION_CONFIG
        if not file.exists():
            return cls()
        reader = ConfigReader(read_json_object(file), str(file))
        base = cls()
        found: dict[str, Any] = {}
        if reader.has(REPETITION):
            repeat = reader.number(REPETITION, low=0.0, high=100.0) or 1.0
            found = {"repeat_penalty": repeat, "repeat_last_n": -1}
        if reader.has("do_sample"):
            base = cls(temperature=1.0, top_k=50, top_p=1.0, min_p=0.0)
            if not reader.boolean("do_sample", True):
                return cls(temperature=0.0, **found)
        for name, one in PARAMETERS.items():
            match one.kind:
                case Number(low, high) if one.is_models:
                    found[name] = reader.number(name, getattr(base, name), low=low, high=high)
                case Whole(first, last) if one.is_models:
                    found[name] = reader.integer(name, getattr(base, name), low=first, high=last)
        return cls(**found)

    @classmethod
    def of_given(cls, values: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` changed by the values of PARAMETERS that are given; None: is not.

        Presence and frequency penalties count all of the answer, as OpenAI's, unless another value
        says what is counted; `repetition_penalty` counts all of prompt and answer, as vLLM's.
        Errors:  UsageError for an unknown name, a value out of range, and two names of one
        """
        if unknown := sorted(values.keys() - PARAMETERS.keys()):
            known = ", ".join(PARAMETERS)
            raise UsageError(f"unknown option {shown(unknown[0])}; known are {known}")
        given = {name: value for name, value in values.items() if value is not None}
        require_one_repeat(given)
        found: dict[str, Any] = {}
        counts = given.get("presence_penalty") or given.get("frequency_penalty")
        if counts and not given.keys() & _SAYS_WINDOW:
            found = {"repeat_last_n": -1, "penalize_prompt": False}
        if (repeat := given.pop(REPETITION, None)) is not None:
            PARAMETERS[REPETITION].kind.check(REPETITION, repeat)
            found |= {"repeat_penalty": repeat, "repeat_last_n": -1}
        return cls(**vars(defaults) | found | given)


REPETITION = "repetition_penalty"
REPEATS = frozenset((REPETITION, "repeat_penalty"))  # two names of one
_SAYS_WINDOW = frozenset(("repeat_penalty", "repeat_last_n", "penalize_prompt"))

# By their names. The last one is no field of `SamplingParams`: `of_given` reads it.
PARAMETERS: dict[str, Parameter] = {
    **{one.name: one.metadata["parameter"] for one in fields(SamplingParams)},
    REPETITION: Parameter(
        1.0,
        Number(0.01, 100.0),
        "The same as --repeat-penalty, of all tokens; vLLM's.",
        http=_ANY_REPEAT,
    ),
}


def require_one_repeat(given: Iterable[str]) -> None:
    """Raise UsageError where both names of the repeat penalty are given."""
    if REPEATS.issubset(given):
        raise UsageError(f"{REPETITION} and repeat_penalty were both given; leave one out")


def _of_metadata(path: str | Path) -> dict[str, Any]:
    """The options that a GGUF file has. Errors: ConfigError, CheckpointError."""
    from hotcold.model.gguf.file import open_gguf  # imports NumPy

    values = {key.removeprefix(_GGUF_PREFIX): value for key, value in
              open_gguf(path).metadata.items() if key.startswith(_GGUF_PREFIX)}  # fmt: skip
    reader = ConfigReader(values, f"{path}: general.sampling")
    found: dict[str, Any] = {}
    for key, name in _GGUF_NAMES.items():
        if not reader.has(key):
            continue
        match PARAMETERS[name].kind:
            case Number(low, high):
                value = reader.number(key, low=low, high=high)
                found[name] = float(f"{value:.7g}")  # of float32: 0.6, not 0.6000000238418579
            case Whole(first, last):
                low = first if name != "top_k" else -_MANY  # less than 1 keeps all, too
                found[name] = max(first, reader.integer(key, low=low, high=last))
    return found


_GGUF_PREFIX = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n", "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip


def suppressed_ids(path: str | Path, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that the model's makers never let it write, such as those of pictures.

    generation_config.json's suppress_tokens, or a GGUF file's.
    Errors:  ConfigError, CheckpointError for a malformed file
    """
    if is_gguf(path):
        from hotcold.model.gguf.file import open_gguf  # imports NumPy

        numbers = open_gguf(path).first.numbers("tokenizer.ggml.suppress_tokens")
        ids = [] if numbers is None else numbers.tolist()
        return tuple(one for one in ids if 0 <= one < vocab_size)
    file = Path(path) / GENERATION_CONFIG
    if not file.exists():
        return ()
    reader = ConfigReader(read_json_object(file), str(file))
    return reader.token_ids("suppress_tokens", (), vocab_size)


def eos_ids(path: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a text: generation_config.json's, else config.json's.

    Errors:  ConfigError for a malformed file or an id outside the vocabulary
    """
    file = Path(path) / GENERATION_CONFIG
    if file.exists():
        reader = ConfigReader(read_json_object(file), str(file))
        if reader.has("eos_token_id"):
            return reader.token_ids("eos_token_id", (), config.vocab_size)
    return config.eos_token_ids
