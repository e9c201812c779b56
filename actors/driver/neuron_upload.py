"""A layer's FFN for a long prompt with all neurons brought to the GPU, in rounds.

In each round the CPU services lay the next neurons into the arena while the GPU service takes those
of the round before, in the other place. A round asked again does no harm: what the GPU has added
already it does not add twice.
"""

from __future__ import annotations

from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.telemetry.step_times import StepTimes
from hotcold.numba_kernels.serve.mailbox import (
    BUSY_NS,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    ROUND,
    SEND,
    STREAM,
)

_UNKNOWN = -1  # how many rounds there are, before the first


def ffn_with_upload(exchange: Exchange, times: StepTimes, layer: int, num_tokens: int) -> None:
    """Let partials[0] be the whole FFN's output. Errors: as in `Exchange.request`."""
    buffers = exchange.buffers
    services = range(buffers.requests.shape[0])
    buffers.requests[:, LAYER], buffers.requests[:, NUM_TOKENS] = layer, num_tokens
    buffers.requests[0, OPERATION], buffers.requests[1:, OPERATION] = STREAM, SEND
    number, num_rounds = 0, _UNKNOWN
    while num_rounds == _UNKNOWN or number <= num_rounds:
        buffers.requests[:, ROUND] = number
        buffers.requests[0, NUM_IDS] = num_rounds
        asked = services if number != num_rounds else services[:1]
        waited_ns = exchange.request(asked)
        times.add("ffn", waited_ns, buffers.replies[asked, BUSY_NS].max())
        if num_rounds == _UNKNOWN:
            num_rounds = int(buffers.replies[1:, NUM_COMPUTED].max())
        number += 1
