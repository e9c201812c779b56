"""The dataclasses that cross process borders, except a step's requests and replies.

Imports little: a command that uses a running system needs nothing else of `actors`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotcold.model.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from hotcold.actors.protocol.arena import ArenaLayout
    from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
    from hotcold.actors.protocol.stripes import Stripes
    from hotcold.actors.telemetry.experts import ExpertCounts
    from hotcold.model.config.model_config import ModelConfig
    from hotcold.placement.machine.pinning import HostShare

PREDICTED_MODES = ("sign", "lowrank")  # a predictor chooses the neurons
THRESHOLD = "threshold"  # neurons fire where their activation is not small
MODES = ("dense", "exact", THRESHOLD, *PREDICTED_MODES)
AUTO_MODE = "auto"  # a predicted mode where it is nearly as exact as the default, and faster
EXCHANGES = ("arena", "calls")
# What drafts tokens: repeated text alone; the model's layer for that (multi-token prediction); its
# own weights in so few bits, which services hold beside the others; the model with the neurons that
# its predictors choose.
NO_MODEL, LAYER_DRAFT, PREDICTED_DRAFT, DRAFT_DTYPES = "ngram", "mtp", "predicted", ("q4",)
DRAFTS = (NO_MODEL, LAYER_DRAFT, *DRAFT_DTYPES, PREDICTED_DRAFT)
_BYTES_A_TOKEN, _BYTES_A_LOGPROB = 200, 12
MOST_DRAFTED = 16  # tokens of one draft
SPECULATE = ("auto", "off", *(str(count) for count in range(1, MOST_DRAFTED + 1)))


@dataclass(frozen=True)
class SystemConfig:
    """One running system: which model, on what, how."""

    model_path: str
    mode: str = "exact"
    num_cpu_actors: int = 1
    num_threads: int = 1  # cores to use; attention on device="cpu" takes them in turn
    context_length: int = 2048
    max_batch: int = 8  # requests that run at once; others wait
    kv_positions: int = 0  # in the KV cache, of all requests together; 0: one context
    kv_dtype: str = "float16"
    prefill_chunk: int = 256
    exchange: str = "arena"
    predictors_path: str = ""  # of the predicted modes
    auto_mode: bool = False  # `mode` is compared with the model's default once all is loaded
    draft: str = NO_MODEL  # what drafts tokens: see DRAFTS
    draft_predictors_path: str = ""  # of PREDICTED_DRAFT
    thresholds_path: str = ""  # of the mode "threshold"
    down_transposed: bool = False  # CPU services hold down projections as the file has them
    expert_pieces: int = 1  # of each expert, or more, where they do: services share them evenly
    has_down_norms: bool = False  # services keep the lengths of down rows, which thresholds need
    plan_path: str = ""  # where neurons go; shared out by threads without one
    device: str = "cpu"  # of services with attention: "cpu" or "cuda"
    requires_gpu: bool = False  # an error where "cuda" is not available; else "cpu" is used
    gpu_memory_bytes: int = 0  # VRAM to use; 0: the free VRAM, less a reserve
    num_hot_neurons: int = -1  # in services with attention, of all layers; -1: the plan's
    num_host_layers: int = 0  # the first ones, whose attention "cuda" leaves to the CPU
    head_on_host: bool = False  # the head too
    # Layers whose neurons are predicted on "cuda", in steps of few tokens; (): none are.
    gpu_predicts: tuple[bool, ...] = ()
    predictors_digest: str = ""  # of the file that these are of; "": any
    neuron_upload_tokens: int = 0  # prompts this long have cold neurons uploaded; 0: none
    weight_dtype: str = ""  # of --dtype: matrices are converted while they load; "": as stored
    pin: str = "auto"  # of PIN_CHOICES: whether services stay on their NUMA nodes' cores
    hosts: tuple[str, ...] = ()  # addresses or ids of CPU services' Ray nodes; (): the driver's
    home: str | None = None  # the Ray node where driver and services run; None: any, or of `hosts`
    numa_root: str = "/"  # has proc and sys of the NUMA nodes; tests have others
    storage: NeuronStorage | None = None  # of a model larger than memory; None: all is in memory
    # Of a file of the KV cache's pages; None: they are found while they are in memory; 0: never.
    prefix_cache_bytes: int | None = None
    speculate: str = "off"  # of SPECULATE: how many tokens of drafts a step verifies

    @property
    def num_hosts(self) -> int:
        """Hosts that share the CPU services equally."""
        return max(1, len(self.hosts))

    @property
    def shares_arena(self) -> bool:
        """Whether all services have the driver's shared memory."""
        return self.exchange == "arena" and not self.hosts

    @property
    def draft_system(self) -> SystemConfig | None:
        """This system as its second weights are loaded: all in memory; None where it has none.

        Those of a layer that drafts are as the file has them, or in 8 bits.
        """
        dtype = self.weight_dtype if self.weight_dtype in ("", "f16", "bf16") else "q8"
        if self.draft != LAYER_DRAFT:
            dtype = self.draft
            if dtype not in DRAFT_DTYPES:
                return None
        return replace(
            self,
            weight_dtype=dtype,
            draft=NO_MODEL,
            down_transposed=False,
            has_down_norms=False,
            storage=None,
        )

    def draft_model(self, config: ModelConfig) -> ModelConfig:
        """The model that the second weights are of: this one, or its layer that drafts."""
        return config.draft_layer() if self.draft == LAYER_DRAFT else config

    def as_json(self) -> bytes:
        """All fields, for a process that is no Ray actor; `from_json` reads them."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> SystemConfig:
        """The system of `as_json`. Errors: ValueError, KeyError, TypeError."""
        values: dict[str, Any] = json.loads(text)
        storage = values["storage"]
        if storage is not None:
            from hotcold.actors.protocol.offloaded_neurons import NeuronStorage  # NumPy

            values["storage"] = NeuronStorage(**storage)
        tuples = {name: tuple(values[name]) for name in ("hosts", "gpu_predicts")}
        return cls(**values | tuples)


@dataclass(frozen=True)
class Fitted:
    """A system with the part that its GPU holds, and a note where that is less than wanted."""

    system: SystemConfig
    note: str
    device_name: str = "cpu"


@dataclass(frozen=True)
class CacheSpec:
    """The KV cache: its pages, the most positions of a sequence, and the format."""

    num_pages: int
    num_positions: int
    dtype: str  # of KV_DTYPES in actors.protocol.options
    num_window_pages: int = 0  # in layers with a window; 0: as many as in the others
    num_recurrent_pages: int = 0  # in recurrent layers; 0: the same

    def pages_of(self, group: int) -> int:
        """Pages of a layer of a group: FULL, WINDOWED or RECURRENT of the loops' mailbox."""
        own = self.num_pages, self.num_window_pages, self.num_recurrent_pages
        return own[group] or self.num_pages


@dataclass(frozen=True, eq=False)
class ServicePart:
    """A service's part of the model; all parts together are a `actors.protocol.topology.Topology`.

    attention: the layers whose attention and KV cache it has
    neuron_ids: its neurons in loading order, an int32 array a layer; None: it holds none. With
    `SystemConfig.down_transposed` of each block a run for each stripe
    has_down_bias: whether its partial output includes the biases of down projections
    host: the address or id of its Ray node; "": the driver's
    stripes: that its neurons are in, by which they are ordered; None: it has no neurons for the CPU
    drafts: its part of the layer that drafts, if the system has that
    """

    name: str
    _: KW_ONLY
    attention: range = range(0)
    has_head: bool = False
    neuron_ids: list[np.ndarray] | None = None
    has_down_bias: bool = False
    host: str = ""
    stripes: Stripes | None = None
    drafts: ServicePart | None = None

    @property
    def is_cpu_service(self) -> bool:
        """Whether it holds cold neurons alone: they are chosen by predictors, and counted."""
        return not self.attention and not self.has_head


@dataclass(frozen=True, eq=False)
class ServiceSpec(ServicePart):
    """A service with all that its process needs to load; `index` is its row in the buffers."""

    index: int
    num_threads: int
    system: SystemConfig  # that it is of
    cache: CacheSpec | None = None  # of a service with attention
    # Of the model when the system started: of its files' state or, with `has_own_files`, content;
    # "": any.
    model_digest: str = ""
    share: HostShare | None = None  # which of the host's nodes and cores; None: any
    gpu_layout: ArenaLayout | None = None  # of the arena, for the GPU service on device="cuda"
    storage: NeuronStorage | None = None  # this service's part of SystemConfig's
    # (L, 2) int64, where predictors' bits are in the arena: see `predictors.read_ahead`.
    among: np.ndarray | None = None
    reserves_cpus: bool = True  # of Ray; a service that replaces another has that one's

    @property
    def draft(self) -> ServiceSpec | None:
        """The same part in the system's second weights; None where it has none."""
        system = self.system.draft_system
        if system is None:
            return None
        part = self if self.drafts is None else self.drafts
        return replace(
            self,
            system=system,
            storage=None,
            among=None,
            attention=part.attention,
            neuron_ids=part.neuron_ids,
            stripes=part.stripes,
            drafts=None,
        )

    @property
    def path(self) -> Path:
        """The model's."""
        return Path(self.system.model_path)

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.gpu_layout is not None

    @property
    def has_own_files(self) -> bool:
        """Whether it reads a copy of the model's files, on a host of its own."""
        return bool(self.system.hosts)

    @property
    def keeps_pages(self) -> bool:
        """Whether the files that it reads stay in the page cache."""
        return self.storage is None

    @property
    def num_ray_cpus(self) -> int:
        """The Ray CPUs that it reserves: one a thread; none with attention."""
        return self.num_threads if self.is_cpu_service and self.reserves_cpus else 0


@dataclass(frozen=True)
class Grammar:
    """What an answer must match: a JSON schema, a regex, or a Lark grammar in llguidance's dialect.

    "calls" is a Lark grammar made from tools' schemas.
    """

    kind: Literal["json_schema", "regex", "lark", "calls"]
    text: str


@dataclass(frozen=True, slots=True, init=False)
class TokenLogprob:
    """Log-probabilities, in nats, of a token and of the likeliest tokens in its place.

    Of the model's own distribution: before temperature, filters and grammar. Those of the likeliest
    take 12 bytes each.
    """

    token_id: int
    logprob: float | None  # None for the first token of a prompt, which nothing precedes
    at: int  # where its text begins in the answer's, in characters
    _top: bytes = field(repr=False)

    def __init__(
        self,
        token_id: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]] = (),
        at: int = 0,
    ) -> None:
        ids, logprobs = zip(*top, strict=True) if top else ((), ())
        for name, value in (
            ("token_id", token_id),
            ("logprob", logprob),
            ("at", at),
            ("_top", struct.pack(f"<{len(ids)}d{len(ids)}i", *logprobs, *ids)),
        ):
            object.__setattr__(self, name, value)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Ids of the likeliest tokens with their logprobs, the likeliest first."""
        count = len(self._top) // _BYTES_A_LOGPROB
        values = struct.unpack(f"<{count}d{count}i", self._top)
        return tuple(zip(values[count:], values[:count], strict=True))

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return _BYTES_A_TOKEN + len(self._top)


@dataclass(frozen=True)
class DrawState:
    """What the rest of an answer depends on beside the tokens until then: another system goes on.

    random: state and increment of the request's PCG64
    forced: tokens of a mark that ends thoughts, still to come; `was_forced`: one has begun
    logprobs: of tokens whose text is held back
    """

    random: tuple[int, int]
    mu: float
    forced: tuple[int, ...]
    was_forced: bool
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt as text, as chat messages, or as token ids: exactly one of them.

    tools: that an answer to messages may call (`model/text/tools.py`)
    template_variables: more values for the chat template, JSON by their names
    is_chat: whether `prompt_ids` are a conversation: messages always are
    request_id: for cancelling; unique
    use_cache: whether the prompt's beginning is taken from the KV cache, and kept there for others
    cache_salt: only requests of one salt share
    is_resumable: whether its events have a `state`, with which another system can go on
    given: tokens of the answer that were handed out before, by a system whose bits are the same
    state: that of the event with the last of them
    """

    sampling: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    is_chat: bool = False
    request_id: str = ""
    grammar: Grammar | None = None
    # How many likeliest tokens beside each new token's logprob, or each prompt token's; None: no
    # logprobs. A prompt with logprobs goes through kernels, as new tokens do.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    # One vector for the prompt instead of new tokens; the prompt goes through kernels, too.
    wants_embedding: bool = False
    use_cache: bool = True
    cache_salt: str = ""
    is_resumable: bool = False
    given: tuple[int, ...] = ()
    state: DrawState | None = None

    @property
    def may_think(self) -> bool:
        """Whether the answer may begin with thoughts. All of it is text in others."""
        return self.is_chat or self.messages is not None or self.sampling.thinking_token_budget >= 0


@dataclass
class DraftCounts:
    """What became of drafts: tokens proposed before the model chose them.

    accepted_at: for each position of a draft, how often its token was the one that was chosen
    by_source: tokens of drafts of each source, and how many of them were chosen
    """

    num_drafts: int = 0
    num_drafted: int = 0  # tokens
    accepted_at: list[int] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that were chosen."""
        return sum(self.accepted_at)

    def add(self, num_drafted: int, source: str) -> None:
        """Count a draft of so many tokens; 0: there was none."""
        self.num_drafts += num_drafted > 0
        self.num_drafted += num_drafted
        if num_drafted:
            self.by_source.setdefault(source, [0, 0])[0] += num_drafted

    def accept(self, place: int, source: str) -> None:
        """Count the token at `place` of the draft that was added last as chosen."""
        self.accepted_at += [0] * (place + 1 - len(self.accepted_at))
        self.accepted_at[place] += 1
        self.by_source[source][1] += 1

    def as_json(self) -> dict[str, Any]:
        """Keys of the command-line contract."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
            "accepted_by_position": self.accepted_at,
        }


@dataclass(frozen=True)
class Generation:
    """A finished request. Times in seconds."""

    text: str
    ids: list[int]
    finish_reason: str  # "stop", "length" or "cancelled"
    num_prompt_tokens: int
    prefill_s: float  # from admission to the first new token
    decode_s: float
    queued_s: float = 0.0  # before admission
    # Times of this request's decoding steps for each token that they gave it, by parts. A step is
    # shared with other requests: the times are of the whole step.
    per_token_ms: dict[str, float] = field(default_factory=dict)
    step_tokens: float = 1.0  # in such a step, of all requests, their prompts and drafts too
    # Shares of all neurons in those steps: a neuron that one request of a step wants is computed.
    neurons_computed: float = 0.0  # gate, up and down
    gates_computed: float = 0.0  # gates: all, or those that a predictor chose
    ups_computed: float = 0.0  # gate and up: those computed, and those found too small then
    # Of neurons on storage, in those steps; {} where all are in memory. See `StepTimes`.
    reads: dict[str, float] = field(default_factory=dict)
    # Where it was wanted, the mean of the prompt's last hidden states: d float32 numbers.
    embedding: list[float] | None = None
    num_cached_tokens: int = 0  # of the prompt, in the KV cache before: not computed again
    drafts: DraftCounts = field(default_factory=DraftCounts)
    num_thought_tokens: int = 0  # of `ids`, the marks around thoughts included

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second, up to the first new token."""
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return num_computed / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens a second after the first."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 and self.decode_s else 0.0

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> Generation:
        """The result of `dataclasses.asdict`, which may have been JSON meanwhile."""
        return cls(**values | {"drafts": DraftCounts(**values["drafts"])})

    def as_json(self) -> dict[str, Any]:
        """The keys of the command-line contract."""
        return {
            "text": self.text,
            "ids": self.ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "neurons_computed": self.neurons_computed,
            "gates_computed": self.gates_computed,
            "ups_computed": self.ups_computed,
            "per_token_ms": self.per_token_ms,
            "reads": self.reads,
            **self.drafts.as_json(),
        }


SAID, THOUGHT, MARK = "said", "thought", "mark"  # what parts of an answer are


@dataclass(frozen=True)
class TokenEvent:
    """New text of a running request; the last event has the whole result.

    parts: what `text` is: SAID, THOUGHT or MARK, which nobody is shown, and how many characters;
    without any all of it is said
    """

    text: str
    result: Generation | None = None
    num_tokens: int = 0  # chosen since the last event
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens whose text begins in `text`
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in one event, the first
    token_ids: tuple[int, ...] = ()  # those chosen since the last event
    num_prompt_tokens: int = 0  # of the request; 0: not known
    parts: tuple[tuple[str, int], ...] = ()
    shown: str | None = None  # as who shows all of the text shows it; None: `text`
    state: DrawState | None = None  # after these tokens, where the request `is_resumable`

    @property
    def readable(self) -> str:
        """The text for who shows all of it, thoughts included."""
        return self.text if self.shown is None else self.shown

    @property
    def told_parts(self) -> tuple[tuple[str, int], ...]:
        """The parts, also of an event that is said as a whole."""
        return self.parts or (((SAID, len(self.text)),) if self.text else ())

    def split(self) -> Iterator[tuple[str, str]]:
        """The parts with their texts, in order."""
        at = 0
        for kind, length in self.told_parts:
            yield kind, self.text[at : at + length]
            at += length

    @property
    def said(self) -> str:
        """Of `text`, the answer itself."""
        return "".join(text for kind, text in self.split() if kind == SAID)

    @property
    def thought(self) -> str:
        """Of `text`, the thoughts alone."""
        return "".join(text for kind, text in self.split() if kind == THOUGHT)

    def __add__(self, later: TokenEvent) -> TokenEvent:
        """This event and a later one as one."""
        return TokenEvent(
            self.text + later.text,
            later.result,
            self.num_tokens + later.num_tokens,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            self.token_ids + later.token_ids,
            later.num_prompt_tokens,
            self.told_parts + later.told_parts,
            None if self.shown is later.shown is None else self.readable + later.readable,
            later.state,
        )


@dataclass(frozen=True)
class ReaderEpoch:
    """A reader of the events of submitted requests, and how often it has begun anew."""

    name: str  # unique
    number: int = 0


@dataclass(frozen=True)
class DriverLoad:
    """A driver's load."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # the share of the KV cache's pages that is allocated
    device: str = "cpu"  # of services with attention
    experts: ExpertCounts | None = None  # of a mixture, since the system began, if asked for
    num_replaced: int = 0  # services, since they were started or their number was changed
    last_replaced: str = ""  # which, and why
    is_compiling: bool = False  # kernels of long prompts, while requests wait for them


COMPILING_LONGER = "compiling kernels of longer prompts, once: later starts have them"
COMPILING = "compiling kernels"  # so begins a stage of kernels that were not in the cache
# Stages that count bytes: of weights, and of files that other hosts lack.
LOADING_WEIGHTS = "loading weights"
WRITING_NEURONS = "writing neurons to a file, once"


@dataclass(frozen=True)
class ServiceProgress:
    """How far a service is: bytes of weights, and whether it waits for a kernel."""

    loaded_bytes: int
    is_compiling: bool
    written_bytes: int = 0  # of its host's file of neurons, while that is made
    file_bytes: int = 0  # and in all; 0 otherwise


@dataclass(frozen=True)
class LoadProgress:
    """How far loading is, in bytes, and its stage."""

    loaded_bytes: int
    total_bytes: int
    stage: str
    notes: tuple[str, ...] = ()  # what differs from what was wanted, a line each
