"""Whether a system uses a GPU, before anything is started."""

from __future__ import annotations

from hotcold.actors.protocol.options import DEVICES
from hotcold.cuda_kernels.device import first_gpu
from hotcold.model.errors import UsageError
from hotcold.placement.crossover import upload_tokens
from hotcold.placement.machine.this_machine import measured_before


def choose_device(device: str, gpu_memory_bytes: int | None) -> str:
    """ "cuda" or "cpu" for what the user gave: "auto" is the GPU where there is one.

    Errors:  UsageError where a GPU was asked for, by `device` or a budget, and cannot be used
    """
    if device not in DEVICES:
        raise UsageError(f"no device named {device!r}; give {' or '.join(DEVICES)}")
    if device == "cpu" and gpu_memory_bytes:
        raise UsageError("--gpu-memory was given with --device cpu; leave one of them out")
    if device == "cuda" and gpu_memory_bytes == 0:
        raise UsageError("--gpu-memory 0 was given with --device cuda; leave one of them out")
    if device == "cpu" or gpu_memory_bytes == 0:
        return "cpu"
    found = first_gpu()
    if not isinstance(found, str):
        return "cuda"
    if device == "cuda" or gpu_memory_bytes:
        option = "--device cuda" if device == "cuda" else "--gpu-memory"
        raise UsageError(f"{option} was given, but {found}; leave it out to use the CPU alone")
    return "cpu"


def neuron_upload_tokens(device: str, exchange: str, hosts: tuple[str, ...]) -> int:
    """From how many tokens on a prompt has cold neurons brought to the GPU; 0 where none does.

    They come by the arena, from services of this host.
    """
    if device == "cpu" or exchange != "arena" or hosts:
        return 0
    return upload_tokens(measured_before())
