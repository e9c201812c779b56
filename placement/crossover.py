"""From how many tokens of a prompt on it pays to bring cold neurons to the GPU."""

from __future__ import annotations

import math

from hotcold.placement.machine.description import Machine

# So many tokens go through a CPU's matrix products in the time that it takes to read the weights
# from memory: cores with AVX-512 and bfloat16 do 100 to 300 GFLOP/s each where they share 10 GB/s.
TOKENS_A_READ = 16
# Where nothing was measured: memory of 100 GB/s, a link of 12.
UNMEASURED_TOKENS = 128


def upload_tokens(machine: Machine | None) -> int:
    """The number of tokens from which a GPU that is sent all weights is done before the CPU.

    The CPU takes T / TOKENS_A_READ times what a read of the weights takes, the link what its
    bandwidth says; the GPU's products are fast beside either.
    T = TOKENS_A_READ * rows_gb_per_s / link_gb_per_s, of all nodes and the first GPU
    """
    if machine is None or not machine.gpus:
        return UNMEASURED_TOKENS
    rows_gb_per_s = sum(node.rows_gb_per_s for node in machine.nodes)
    return math.ceil(TOKENS_A_READ * rows_gb_per_s / machine.gpus[0].link_gb_per_s)
