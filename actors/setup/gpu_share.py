"""Whether a system uses a GPU, and what of it the GPU is expected to hold, before it is opened."""

from __future__ import annotations

import math

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.cuda_kernels.device import first_gpu
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.placement.machine.this_machine import measured_before
from hotcold.placement.solver.plan_devices import gpu_budget


def only_on_cpu(config: ModelConfig) -> str:
    """Why no GPU has kernels for the model; "" where it has."""
    if config.experts is not None and config.experts.has_predictors:
        return "experts with predictors of their own run on the CPU only"
    if config.latent is not None:
        return f"{config.family}'s latent attention runs on the CPU only"
    if config.norms_rotated:
        return f"{config.family}'s norms behind rotations run on the CPU only"
    if not config.has_like_layers:
        return f"{config.family}'s layers, which are of several kinds, run on the CPU only"
    return ""


def usable_gpu_bytes(limit_bytes: int, is_sure: bool) -> int:
    """Bytes of the GPU that a system uses at most, or surely; 0: no limit.

    Where no GPU is seen here, the limit.
    """
    found = first_gpu()
    if isinstance(found, str):
        return limit_bytes
    return gpu_budget(limit_bytes or (None if is_sure else found[1]), found[1])


def num_cold_neurons(system: SystemConfig, config: ModelConfig) -> int:
    """How many neurons of all layers the CPU services hold."""
    num_hot = max(0, system.num_hot_neurons) if system.device == "cuda" else 0
    return config.num_neurons - num_hot


def choose_device(device: str, gpu_memory_bytes: int | None, only_on_cpu: str = "") -> str:
    """Resolve --device: "auto" is "cuda" where there is a GPU, else "cpu".

    only_on_cpu: why the model cannot use one
    Errors:  UsageError where `device` or a budget demands a GPU and none can be used
    """
    if device == "cpu" and gpu_memory_bytes:
        raise UsageError("--gpu-memory was given with --device cpu; leave one of them out")
    if device == "cuda" and gpu_memory_bytes == 0:
        raise UsageError("--gpu-memory 0 was given with --device cuda; leave one of them out")
    if device == "cpu" or gpu_memory_bytes == 0:
        return "cpu"
    found = only_on_cpu or first_gpu()
    if not isinstance(found, str):
        return "cuda"
    if device == "cuda" or gpu_memory_bytes:
        option = "--device cuda" if device == "cuda" else "--gpu-memory"
        alone = "" if only_on_cpu else " to use the CPU alone"
        raise UsageError(f"{option} was given, but {found}; leave it out{alone}")
    return "cpu"


# A CPU multiplies so many tokens in the time that it takes to read the weights from memory: cores
# with AVX-512 and bfloat16 do 100 to 300 GFLOP/s each where they share 10 GB/s.
TOKENS_A_READ = 16
# Where nothing was measured: memory of 100 GB/s, a link of 12.
UNMEASURED_TOKENS = 128


def neuron_upload_tokens(system: SystemConfig, config: ModelConfig) -> int:
    """The prompt length from which cold neurons are uploaded to the GPU; 0: never.

    That is from where a GPU that first copies all weights is faster than the CPU:
    T = TOKENS_A_READ * rows_gb_per_s / link_gb_per_s, of all nodes and the first GPU
    The CPU takes T / TOKENS_A_READ times as long as reading the weights, the GPU as long as the
    copy: its matmul is fast beside it.
    Neurons travel through the arena, from services of this host, without their blocks: so a
    mixture's stay on the CPU.
    """
    if system.device == "cpu" or not system.shares_arena or config.experts is not None:
        return 0
    machine = measured_before()
    if machine is None or not machine.gpus:
        return UNMEASURED_TOKENS
    rows_gb_per_s = sum(node.rows_gb_per_s for node in machine.nodes)
    return math.ceil(TOKENS_A_READ * rows_gb_per_s / machine.gpus[0].link_gb_per_s)
