"""The exchange over ordinary actor calls: for services that share no memory with the driver.

The driver's buffers are private arrays. A request's inputs travel with the call, its outputs return
as an object in Ray's store. The service handles the request in an arena of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from hotcold.actors.exchange.doorbell_exchange import Exchange, Watch
from hotcold.actors.exchange.pulse import POLL_S
from hotcold.actors.kv_cache.pool import num_pages_of
from hotcold.actors.protocol.failures import AnswerFailed, RequestError, ServiceLost, service_error
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    COUNT_FFN,
    END_LAYER,
    FFN,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    LAYERS,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    WEIGHS_BLOCKS,
    SharedBuffers,
)
from hotcold.numba_kernels.recurrent_arrays import STATE_POSITIONS

_WITH_ATTENTION = (ATTENTION, LAYERS)
_OF_TOKENS = ("hidden", "embedded", "layer_embeddings")
_INPUTS = {
    # A layer with an FFN alone has the ffn_residual of the layer before.
    **dict.fromkeys(_WITH_ATTENTION, ("positions", "slots", "ffn_residual", *_OF_TOKENS)),
    HEAD: _OF_TOKENS,
    FFN: ("ffn_input",),
    COUNT_FFN: ("ffn_input",),
}
_OF_SERVICE = ("active_ids", "active_masks")  # a row for each service
_PAGES = "page_tables"  # of each group a row for each slot


@dataclass(frozen=True)
class ServiceRequest:
    """A request and the arrays that it reads, cut to its tokens."""

    words: np.ndarray
    inputs: dict[str, np.ndarray]

    @classmethod
    def read(cls, buffers: SharedBuffers, service: int) -> "ServiceRequest":
        """The request in the buffers for `service`."""
        words = buffers.requests[service].copy()
        num_tokens = int(words[NUM_TOKENS])
        names = _INPUTS.get(int(words[OPERATION]), ())
        inputs = {name: getattr(buffers, name)[:num_tokens].copy() for name in names}
        if words[OPERATION] == FFN and words[NUM_IDS] > 0:
            for name in _OF_SERVICE if num_tokens > 1 else _OF_SERVICE[:1]:
                inputs[name] = getattr(buffers, name)[service, : words[NUM_IDS]].copy()
        if words[OPERATION] == FFN and words[WEIGHS_BLOCKS]:
            inputs["block_weights"] = buffers.block_weights[:num_tokens].copy()
        if words[OPERATION] in _WITH_ATTENTION:
            num_pages = num_pages_of(int(inputs["positions"].max()) + 1, STATE_POSITIONS)
            inputs[_PAGES] = buffers.page_tables[:, np.unique(inputs["slots"]), :num_pages]
        return cls(words, inputs)

    def write(self, buffers: SharedBuffers, service: int) -> None:
        """Put it into the buffers of the process that serves it."""
        buffers.requests[service] = self.words
        for name, array in self.inputs.items():
            target = getattr(buffers, name)
            if name == _PAGES:
                target[:, np.unique(self.inputs["slots"]), : array.shape[2]] = array
                continue
            if name in _OF_SERVICE:
                target = target[service]
            target[: array.shape[0]] = array


@dataclass(frozen=True)
class ServiceReply:
    """A reply and the arrays that the service wrote."""

    words: np.ndarray
    outputs: dict[str, np.ndarray]

    @classmethod
    def read(cls, buffers: SharedBuffers, service: int) -> "ServiceReply":
        """The reply in the buffers from `service`."""
        outputs = {name: view.copy() for name, view in _outputs(buffers, service).items()}
        return cls(buffers.replies[service].copy(), outputs)

    def write(self, buffers: SharedBuffers, service: int) -> None:
        """Put it into the driver's buffers."""
        buffers.replies[service] = self.words
        for name, view in _outputs(buffers, service).items():
            view[:] = self.outputs[name]


def _outputs(buffers: SharedBuffers, service: int) -> dict[str, np.ndarray]:
    words = buffers.requests[service]
    operation, num_tokens = int(words[OPERATION]), int(words[NUM_TOKENS])
    if operation == ATTENTION:
        written = ("ffn_residual", "ffn_input", "block_weights")
        return {name: getattr(buffers, name)[:num_tokens] for name in written}
    if operation == LAYERS:
        return {
            "ffn_residual": buffers.ffn_residual[:num_tokens],
            "logits": buffers.logits[: num_tokens - int(words[FIRST_LOGIT])],
            "block_tokens": buffers.block_tokens[int(words[LAYER]) : int(words[END_LAYER])],
        }
    if operation == HEAD:
        return {"logits": buffers.logits[: num_tokens - int(words[FIRST_LOGIT])]}
    if operation in (FFN, COUNT_FFN):
        found = {"partials": buffers.partials[service, :num_tokens]}
        if buffers.more_partials.size:
            found["more_partials"] = buffers.more_partials[service, :, :num_tokens]
        return found
    return {}


class CallExchange(Exchange):
    """Requests by `handle.answer.remote(request)`, one call a service."""

    def __init__(
        self, buffers: SharedBuffers, watch: Watch, names: Sequence[str], handles: Sequence[Any]
    ) -> None:
        """`names[s]` and `handles[s]` are of the actor of service s."""
        self.buffers = buffers
        self._watch = watch
        self._names = names
        self._handles = handles

    def request(self, services: Sequence[int]) -> int:
        """Call all, wait for all. Errors: `Exchange.request`."""
        started = time.monotonic_ns()
        refs = {
            self._handles[s].answer.remote(ServiceRequest.read(self.buffers, s)): s
            for s in services
        }
        pending: list[Any] = list(refs)
        # Raised once no service works on the request any more.
        failure: RequestError | None = None
        lost: list[ServiceLost] = []
        num_polls = 0
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            for ref in done:
                try:
                    self._collect(ref, refs[ref])
                except RequestError as error:
                    failure = failure or error
                except ServiceLost as error:
                    lost.append(error)
            try:
                if pending:
                    num_polls += 1
                    self._watch.check([refs[ref] for ref in pending], num_polls)
            except ServiceLost as error:
                lost.append(error)
                pending = [ref for ref in pending if refs[ref] not in error.causes]
        if lost:
            raise ServiceLost.joined(lost)
        if failure is not None:
            raise failure
        return time.monotonic_ns() - started

    def _collect(self, ref: Any, service: int) -> None:
        try:
            reply: ServiceReply = ray.get(ref)
        except ray.exceptions.RayError as error:
            cause = service_error(f"{self._names[service]} service", error)
            if isinstance(cause, AnswerFailed):
                raise cause from error
            raise ServiceLost(service, str(cause)) from error
        reply.write(self.buffers, service)
