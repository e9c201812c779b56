"""Machines, models and problems for the tests of placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hotcold.cuda_kernels.device import Gpu
from hotcold.model.config.build import build_config
from hotcold.model.config.layer_spec import RouterSpec
from hotcold.model.config.model_config import ExpertsConfig, ModelConfig
from hotcold.model.weights.sizes import kv_cache_bytes
from hotcold.placement.machine.description import CpuNode, GpuDevice, Machine
from hotcold.placement.machine.survey import MachineLayout, NodeLayout
from hotcold.placement.plan import PlacementPlan, PlanRequest
from hotcold.placement.planner import Planner
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.problem import ATTENTION, HEAD, PREDICTOR, Problem


def llama_config(**changes: Any) -> ModelConfig:
    """A small Llama with ReLU, float16."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "hidden_act": "relu",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 1000,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return build_config(values | changes)


def mixture_config(
    num_experts: int = 8,
    num_chosen: int = 2,
    size: int = 128,
    shared_size: int = 0,
    dense_layers: tuple[int, ...] = (),
    **changes: Any,
) -> ModelConfig:
    """`llama_config` with experts in the other layers."""
    router = RouterSpec(
        num_experts=num_experts, num_chosen=num_chosen, score="softmax", norms_chosen=True
    )
    experts = ExpertsConfig(
        router=router, size=size, shared_size=shared_size, dense_layers=dense_layers
    )
    return replace(llama_config(**changes), experts=experts)


def make_machine(
    gpu_bytes: tuple[int, ...] = (8 << 30,),
    node_bytes: tuple[int, ...] = (16 << 30, 16 << 30),
    exchange_us: float = 0.01,
) -> Machine:
    """Nodes of 50 GB/s and GPUs of 1000 GB/s, with so much free."""
    return Machine(
        name="made up",
        nodes=tuple(
            CpuNode(f"node{i}", 8, 2 * free, free, 55.0, 50.0, 40.0)
            for i, free in enumerate(node_bytes)
        ),
        gpus=tuple(
            GpuDevice(f"gpu{i}", "made up", 2 * free, free, 1000.0, 25.0, True)
            for i, free in enumerate(gpu_bytes)
        ),
        exchange_us=exchange_us,
        date="",
    )


def make_plan(
    config: ModelConfig, machine: Machine, profile: ActivationProfile | None, request: PlanRequest
) -> PlacementPlan:
    """A plan with the KV cache of one context, and nothing left aside for processes."""
    kv_bytes = kv_cache_bytes(config, request.context_length, request.kv_dtype)
    return Planner(config, machine, profile, request, kv_bytes).plan(time_limit_s=10.0)


def layout_of(machine: Machine) -> MachineLayout:
    """What a process sees of `machine`, which measures nothing."""
    nodes = tuple(
        NodeLayout(node.name, tuple(range(node.num_cores)), node.total_bytes, node.free_bytes, 0)
        for node in machine.nodes
    )
    gpus = tuple(
        Gpu(number, gpu.model, gpu.total_bytes, gpu.free_bytes, (9, 0))
        for number, gpu in enumerate(machine.gpus)
    )
    return MachineLayout(machine.name, nodes, gpus)


def random_problem(
    rng: np.random.Generator,
    num_layers: int,
    group_sizes: tuple[int, ...],
    num_gpus: int,
    num_columns: int,
    *,
    has_predictors: bool = False,
    tightness: float = 1.2,
    is_ragged: bool = False,
) -> Problem:
    """A problem whose devices together hold `tightness` times what there is, about.

    Frequencies fall in each layer; a GPU is 2 to 6 times as fast as a column. An exchange costs
    from next to nothing to more than a layer's neurons. With `is_ragged` layers end after some of
    the groups.
    """
    kinds = [*[ATTENTION] * num_layers, HEAD, *[PREDICTOR] * num_layers * has_predictors]
    groups, devices = len(group_sizes), num_gpus + num_columns
    sizes = np.tile(np.array(group_sizes, np.int64), (num_layers, 1))
    if is_ragged:
        for row in sizes:
            row[rng.integers(1, groups + 1) :] = 0
    frequency = -np.sort(-rng.random((num_layers, groups)), axis=1)
    speed = np.concatenate([rng.uniform(2, 6, num_gpus), rng.uniform(0.7, 1.3, num_columns)])
    frequency *= sizes > 0
    seconds = (sizes * (0.2 + frequency))[:, :, None] / speed * 1e-5
    neuron_bytes = int(rng.integers(3, 50))
    part_bytes = rng.integers(1, 4 * 64 * neuron_bytes, len(kinds))
    total = int(sizes.sum()) * neuron_bytes + int(part_bytes.sum())
    cut = rng.dirichlet(np.full(devices, 4.0))
    part_speed = np.append(speed[:num_gpus], speed[num_gpus:].sum())
    return Problem(
        num_gpus=num_gpus,
        budget_bytes=(cut * total * tightness).astype(np.int64),
        neuron_bytes=neuron_bytes,
        group_sizes=sizes,
        group_seconds=seconds,
        group_frequency=frequency,
        part_kinds=np.array(kinds),
        part_bytes=part_bytes,
        part_seconds=part_bytes[:, None] / neuron_bytes / part_speed * 1e-5,
        exchange_s=float(rng.choice([1e-7, 2e-5, 2e-4, 2e-3])),
    )
