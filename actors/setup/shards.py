"""What each service of a system loads: its neurons, threads and share of memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from hotcold.actors.kv_cache.pool import Window, num_pages_of
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import (
    LAYER_DRAFT,
    MOST_DRAFTED,
    CacheSpec,
    ServicePart,
    ServiceSpec,
    SystemConfig,
)
from hotcold.actors.protocol.neuron_bundles import bundle_bytes
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS, MAX_GUESSED
from hotcold.actors.protocol.stripes import (
    Stripes,
    every_stripe,
    most_outputs,
    num_outputs,
    num_shares,
    output_shard,
    output_stripes,
)
from hotcold.actors.setup.assignment import (
    Layers,
    cold_neurons,
    cold_shards,
    hot_neurons,
    service_stripes,
    system_plan,
)
from hotcold.actors.setup.modes import keeps_down_outputs
from hotcold.actors.telemetry.snapshot import num_buckets
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.limits import cpu_quota
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.down_outputs import has_down_outputs
from hotcold.model.weights.sizes import kv_cache_bytes, recurrent_page_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import RECURRENT, WINDOWED
from hotcold.numba_kernels.recurrent_arrays import STATE_POSITIONS, window_size
from hotcold.placement.machine.numa import nodes_with_memory, thread_counts
from hotcold.placement.machine.pinning import HostShare, not_pinned_because
from hotcold.placement.machine.survey import usable_cores
from hotcold.placement.machine.sysfs import read_numa_nodes
from hotcold.placement.plan import PlacementPlan

# Rows of logits in the arena: generation needs one a request, scoring is faster with more. Eight
# rows are 4 MiB of shared memory for a vocabulary of 128 thousand.
_MIN_LOGITS = 8
_MORE_ENDS = 2  # of the last chunk: of its last whole page, and of the one before
_CHUNKS_AT_ONCE = 4  # of a prompt, where neurons are read from storage; some MB each


def service_specs(system: SystemConfig, config: ModelConfig) -> list[ServiceSpec]:
    """The attention service and the CPU services of a system that starts.

    `config` is of `served_config`: which neurons are hot depends on the rows' formats. Not for a
    running system: profile and plan may have changed since it started.
    Errors:  ArtifactError
    """
    plan = system_plan(system, config)
    hot = hot_neurons(system, config, plan)
    gpu = _attention_spec(system, config, hot)
    return [gpu, *_cpu_specs(system, config, [gpu], *_cold_shards(system, config, plan, [hot]))]


def attention_spec(system: SystemConfig, config: ModelConfig) -> ServiceSpec:
    """The first of `service_specs`, in less time. Errors: ArtifactError."""
    hot = hot_neurons(system, config, system_plan(system, config))
    return _attention_spec(system, config, hot)


def _attention_spec(system: SystemConfig, config: ModelConfig, hot: Layers | None) -> ServiceSpec:
    of_hot = None
    if hot is not None and system.device == "cpu":
        of_hot, hot = every_stripe(config, hot)
    identity = ModelIdentity.of(system.model_path)
    return ServiceSpec(
        "gpu",
        0,
        system.num_threads,
        system,
        cache=CacheSpec(
            num_kv_pages(system),
            system.context_length,
            system.kv_dtype,
            num_window_pages(system, config),
            num_recurrent_pages(system, config),
        ),
        attention=range(config.num_layers),
        has_head=True,
        drafts=attention_drafts() if system.draft == LAYER_DRAFT else None,
        neuron_ids=hot,
        stripes=of_hot,
        host=system.hosts[0] if system.hosts else "",
        model_digest=identity.content if system.hosts else identity.state,
        share=host_share(system, service_threads(system), None),
        gpu_layout=None if system.device == "cpu" else arena_layout(system, config),
        storage=system.storage,
    )


def changed_specs(
    system: SystemConfig, config: ModelConfig, attention: Sequence[ServiceSpec]
) -> list[ServiceSpec]:
    """The services of a running system after its number of CPU services has changed.

    Services with attention, which come first, keep their neurons; the others are assigned to CPU
    services round-robin.
    """
    hot = [spec.neuron_ids for spec in attention]
    cold = _cold_shards(system, config, None, hot)
    share = host_share(system, service_threads(system), None)
    layout = arena_layout(system, config)
    kept = [
        replace(spec, system=system, share=share, gpu_layout=layout if spec.on_gpu else None)
        for spec in attention
    ]
    return [*kept, *_cpu_specs(system, config, kept, *cold)]


def _cold_shards(
    system: SystemConfig,
    config: ModelConfig,
    plan: PlacementPlan | None,
    hot: Sequence[Layers | None],
) -> tuple[list[Stripes], list[Layers]]:
    """Each CPU service's stripes, and its neurons: those that no service of `hot` has."""
    planned, others = cold_neurons(system, config, plan, hot)
    stripes = _cpu_stripes(system, config, planned)
    if system.down_transposed:
        return stripes, [output_shard(config, own) for own in stripes]
    return stripes, cold_shards(config, planned, others, stripes)


def _cpu_stripes(
    system: SystemConfig, config: ModelConfig, planned: list[Layers] | None
) -> list[Stripes]:
    """Each CPU service's stripes; `planned`: its neurons by the plan."""
    threads = service_threads(system)
    if system.down_transposed:
        return output_stripes(config, threads, system.expert_pieces)
    return service_stripes(config, threads, planned)


def attention_drafts() -> ServicePart:
    """The attention service's part of the layer that drafts."""
    return ServicePart("gpu", attention=range(1), has_head=True)


def cpu_drafts(config: ModelConfig, threads: Sequence[int]) -> list[ServicePart]:
    """CPU services' parts of a model's layer that drafts: neurons in proportion to threads."""
    layer = config.draft_layer()
    stripes = service_stripes(layer, threads, None)
    every = [np.arange(size, dtype=np.int32) for size in layer.ffn_sizes]
    shards = cold_shards(layer, None, every, stripes)
    return [
        ServicePart(f"cpu{i}", neuron_ids=shard, stripes=own)
        for i, (shard, own) in enumerate(zip(shards, stripes, strict=True))
    ]


def _cpu_specs(
    system: SystemConfig,
    config: ModelConfig,
    attention: Sequence[ServiceSpec],
    stripes: Sequence[Stripes],
    shards: Sequence[Layers],
) -> list[ServiceSpec]:
    """The CPU services after those with attention, which have the same model and formats.

    CPU service i has neurons shards[i], in stripes[i]. Hosts have them round-robin.
    """
    like, threads = attention[0], service_threads(system)
    drafts = cpu_drafts(config, threads) if system.draft == LAYER_DRAFT else [None] * len(threads)
    return [
        ServiceSpec(
            f"cpu{i}",
            len(attention) + i,
            threads[i],
            system,
            neuron_ids=shard,
            has_down_bias=i == 0,
            host=system.hosts[i % len(system.hosts)] if system.hosts else "",
            model_digest=like.model_digest,
            share=host_share(system, threads, i),
            storage=_storage_share(system, shard, shards),
            among=_among(system, shards, i),
            stripes=stripes[i],
            drafts=drafts[i],
        )
        for i, shard in enumerate(shards)
    ]


def served_config(system: SystemConfig, config: ModelConfig) -> ModelConfig:
    """`config` with the formats in which the system's services hold matrices.

    Errors:  CheckpointError, UsageError
    """
    checkpoint, by_layer = Checkpoint(Path(system.model_path)), system.device != "cuda"
    dtype, transposed = system.weight_dtype, system.down_transposed
    return stored_config(checkpoint, config, dtype, by_layer, transposed)


def draft_config(system: SystemConfig, config: ModelConfig) -> ModelConfig | None:
    """The model of the second weights, of drafts, with their formats; None where there are none.

    Errors:  CheckpointError, UsageError
    """
    draft = system.draft_system
    return None if draft is None else served_config(draft, system.draft_model(config))


def can_keep_transposed(system: SystemConfig, config: ModelConfig) -> bool:
    """Whether down projections can stay transposed, as GGUF files have them: a row an output.

    Errors:  CheckpointError
    """
    return (
        keeps_down_outputs(system.mode, config)
        and system.device == "cpu"
        and not system.weight_dtype
        and has_down_outputs(Checkpoint(Path(system.model_path)), config)
    )


def _storage_share(
    system: SystemConfig, shard: Layers, shards: Sequence[Layers]
) -> NeuronStorage | None:
    """One CPU service's storage: its share of the kept rows is its share of the neurons.

    None where it has no neurons.
    """
    storage = system.storage
    own, total = (sum(ids.size for ids in layers) for layers in (shard, chain(*shards)))
    if storage is None or not own:
        return None
    return replace(
        storage,
        num_gates=storage.num_gates * own // total,
        num_up_downs=storage.num_up_downs * own // total,
    )


def _among(system: SystemConfig, shards: Sequence[Layers], service: int) -> np.ndarray | None:
    """For each layer, the neurons of the services before this one, and of all: (L, 2) int64."""
    if system.storage is None or not system.storage.predictor_words:
        return None
    sizes = np.array([[ids.size for ids in shard] for shard in shards], np.int64)
    return np.stack([sizes[:service].sum(axis=0), sizes.sum(axis=0)], axis=1)


def service_threads(system: SystemConfig) -> tuple[int, ...]:
    """Threads of each CPU service, in proportion to its cores where services are pinned to nodes.

    Services are assigned to hosts round-robin; all hosts are assumed to be like this one.
    """
    num_services = system.num_cpu_actors // system.num_hosts
    root = Path(system.numa_root)
    nodes = nodes_with_memory(read_numa_nodes(root), usable_cores(root, system.num_threads))
    if not_pinned_because(system.pin, nodes, cpu_quota(root)):
        nodes = ()
    threads = thread_counts(nodes, num_services, max(system.num_threads, num_services))
    return tuple(count for count in threads for _ in range(system.num_hosts))


def host_share(system: SystemConfig, threads: Sequence[int], service: int | None) -> HostShare:
    """The share of its host that CPU service `service` has; None: the attention service."""
    index = None if service is None else service // system.num_hosts
    return HostShare(tuple(threads[:: system.num_hosts]), index, system.pin, system.numa_root)


def num_kv_pages(system: SystemConfig) -> int:
    """Pages of the KV cache."""
    return num_pages_of(max(system.kv_positions, system.context_length))


def chunks_at_once(system: SystemConfig) -> int:
    """Chunks of a long prompt that go through each layer together."""
    return 1 if system.storage is None else _CHUNKS_AT_ONCE


def kv_window(system: SystemConfig, config: ModelConfig) -> Window | None:
    """What a sequence has pages for in layers with a window; None: there are no such layers."""
    size = max(config.windows, default=0)
    if not size:
        return None
    return Window(size, max(chunks_at_once(system) * _max_tokens(system), KERNEL_TOKENS))


def num_window_pages(system: SystemConfig, config: ModelConfig) -> int:
    """Pages of the KV cache in layers with a window.

    For each sequence those of a window and a step. Others keep the ends of prompts that were left
    behind, so later ones that begin alike are found; a quarter may be kept by writes to a file.
    """
    window = kv_window(system, config)
    if window is None:
        return 0
    num_sequences = system.max_batch + system.max_batch // 4 + 1
    return min(num_kv_pages(system), num_sequences * window.num_pages)


def cache_windows(system: SystemConfig, config: ModelConfig) -> dict[int, tuple[Window, int]]:
    """Of each group of pages beside FULL what a sequence sees, and how many pages there are."""
    windows = {
        WINDOWED: (kv_window(system, config), num_window_pages(system, config)),
        RECURRENT: (recurrent_window(system, config), num_recurrent_pages(system, config)),
    }
    return {group: (own, count) for group, (own, count) in windows.items() if own is not None}


def recurrent_window(system: SystemConfig, config: ModelConfig) -> Window | None:
    """What a sequence has pages for in recurrent layers; None: there are no such layers."""
    if config.recurrent is None:
        return None
    return Window(
        window_size(config.recurrent.conv_size),
        KERNEL_TOKENS,
        num_reserved=1,
        page_positions=STATE_POSITIONS,
        most_ends=chunks_at_once(system) + _MORE_ENDS,
    )


def num_recurrent_pages(system: SystemConfig, config: ModelConfig) -> int:
    """Pages of the states of recurrent layers: one for each sequence, and those of one's chunk.

    They are large. A sequence has a second one for a few tokens in 16, for which it may wait; those
    that are free keep the ends of prompts that were left behind.
    """
    window = recurrent_window(system, config)
    return 0 if window is None else system.max_batch + window.num_pages


def num_state_pages_of(config: ModelConfig, num_positions: int) -> int:
    """Pages of states that a sequence of so many positions would have at most."""
    return 0 if config.recurrent is None else num_pages_of(num_positions, STATE_POSITIONS)


def system_kv_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of the KV cache once all its pages are written."""
    pages = num_kv_pages(system), num_window_pages(system, config)
    positions, of_windows = (count * PAGE_POSITIONS for count in pages)
    of_states = num_recurrent_pages(system, config) * recurrent_page_bytes(config)
    of_layers = kv_cache_bytes(config, positions, system.kv_dtype, of_windows)
    if system.draft == LAYER_DRAFT:
        of_layers += kv_cache_bytes(config.draft_layer(), positions, system.kv_dtype)
    return of_layers + of_states


def _max_tokens(system: SystemConfig) -> int:
    """Tokens of a step at most."""
    return max(system.max_batch, min(system.prefill_chunk, system.context_length))


def _max_logits(system: SystemConfig) -> int:
    """Rows of logits: one a request, and one for each token of a draft."""
    if system.speculate == "off":
        return max(system.max_batch, _MIN_LOGITS)
    drafted = MOST_DRAFTED if system.speculate == "auto" else int(system.speculate)
    return max(_MIN_LOGITS, min(KERNEL_TOKENS, system.max_batch * (1 + drafted)))


def _num_guessed(system: SystemConfig, config: ModelConfig) -> int:
    """Tokens of a step whose next layer's experts are read ahead."""
    return 0 if system.storage is None or config.experts is None else MAX_GUESSED


def _num_outputs(system: SystemConfig, config: ModelConfig) -> int:
    """Sums that a CPU service passes on at most."""
    if system.num_cpu_actors == 1:
        return 1
    if system.plan_path:
        return most_outputs(num_shares(config), config.ffn_bias)
    return num_outputs(_cpu_stripes(system, config, None), config.ffn_bias)


def arena_layout(system: SystemConfig, config: ModelConfig) -> ArenaLayout:
    """The buffers that this system needs."""
    return ArenaLayout(
        num_services=1 + system.num_cpu_actors,
        max_tokens=_max_tokens(system),
        width=config.hidden_size,
        max_neurons=config.largest_ffn,
        vocab_size=config.vocab_size,
        max_logits=_max_logits(system),
        num_slots=system.max_batch,
        pages_a_slot=num_pages_of(system.context_length),
        num_layers=config.num_layers,
        layer_embeddings=config.num_layers * config.per_layer_size,
        num_outputs=_num_outputs(system, config),
        num_blocks=neurons.weighed_blocks(config),
        num_guessed=_num_guessed(system, config),
        num_buckets=num_buckets(config),
        predictor_words=system.storage.predictor_words if system.storage is not None else 0,
        state_pages_a_slot=num_state_pages_of(config, system.context_length),
        gpu_predicts=bool(system.gpu_predicts),
        bundle_bytes=bundle_bytes(system.num_cpu_actors) if system.neuron_upload_tokens else 0,
    )
