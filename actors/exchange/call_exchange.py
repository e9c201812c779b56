"""The exchange over ordinary actor calls: for services that share no memory with the driver.

A request's inputs travel with the call, its outputs return as an object in Ray's store. The service
handles the request in an arena of its own. Services of another host share one there: all of them
are asked by one call to its relay.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange, Watch
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

if TYPE_CHECKING:
    from hotcold.actors.exchange.relay import Relay

_WITH_ATTENTION = (ATTENTION, LAYERS)
_OF_TOKENS = ("hidden", "embedded", "layer_embeddings")
_INPUTS = {
    # A layer with an FFN alone has the ffn_residual of the layer before.
    **dict.fromkeys(_WITH_ATTENTION, ("positions", "slots", "ffn_residual", *_OF_TOKENS)),
    HEAD: _OF_TOKENS,
    FFN: ("ffn_input",),
    COUNT_FFN: ("ffn_input",),
}
_SHARED_INPUT = "ffn_input"  # what every service of a request reads
_OF_SERVICE = ("active_ids", "active_masks")  # a row for each service
_PAGES = "page_tables"  # of each group a row for each slot


@dataclass(frozen=True)
class ServiceRequest:
    """A request and the arrays that it reads, cut to its tokens."""

    words: np.ndarray
    inputs: dict[str, np.ndarray]

    @classmethod
    def read(cls, buffers: SharedBuffers, service: int) -> ServiceRequest:
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
    def read(cls, buffers: SharedBuffers, service: int) -> ServiceReply:
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


class CalledService:
    """A service with an arena of its own, whose actor is asked itself."""

    def __init__(self, service: int, name: str, handle: Any, watch: Watch) -> None:
        """`name` and `handle` are of the actor of `service`."""
        self.services = (service,)
        self._name = f"{name} service"
        self._handle = handle
        self._watch = watch

    def ask(self, requests: Mapping[int, ServiceRequest]) -> Any:
        """Start to answer the service's request; returns an object ref, of `result`."""
        (request,) = requests.values()
        return self._handle.answer.remote(request)

    def result(self, call: Any) -> dict[int, ServiceReply]:
        """The reply, by service. Errors: `Exchange.request`."""
        num_polls, (service,) = 0, self.services
        while not ray.wait([call], timeout=POLL_S)[0]:
            num_polls += 1
            self._watch.check(self.services, num_polls)
        try:
            return {service: ray.get(call)}
        except ray.exceptions.RayError as error:
            cause = service_error(self._name, error)
            if isinstance(cause, AnswerFailed):
                raise cause from error
            raise ServiceLost(service, str(cause)) from error


class CallExchange(Exchange):
    """Services without the driver's arena, by calls; this host's through it, if there is one.

    Each partial output travels back on its own, so all are added in the services' order.
    """

    def __init__(
        self,
        buffers: SharedBuffers,
        called: Sequence[CalledService | Relay],
        local: ArenaExchange | None = None,
    ) -> None:
        """`local` reaches every service that none of `called` has; `buffers` are the driver's."""
        self.buffers = buffers
        self._called = called
        self._local = local

    @property
    def next_number(self) -> int:
        """Sequence number of the next request by this host's doorbells."""
        return 0 if self._local is None else self._local.next_number

    def request(self, services: Sequence[int]) -> int:
        """Send to all at once.

        Errors:  `Exchange.request`; ServiceError too where a relay, which is not replaced, died or
                 is stuck
        """
        started = time.monotonic_ns()
        calls, own = [], list(services)
        for called in self._called:
            reached = [service for service in called.services if service in services]
            own = [service for service in own if service not in reached]
            requests = {service: ServiceRequest.read(self.buffers, service) for service in reached}
            for service in reached[1:]:  # what all of them read travels once
                requests[service].inputs.pop(_SHARED_INPUT, None)
            if requests:
                calls.append((called, called.ask(requests)))
        failure: RequestError | None = None  # raised once no service works on it
        lost: list[ServiceLost] = []
        try:
            if own:
                assert self._local is not None
                self._local.request(own)
        except RequestError as error:
            failure = error
        except ServiceLost as error:
            lost.append(error)
        for called, call in calls:
            try:
                replies: dict[int, ServiceReply] = called.result(call)
            except RequestError as error:
                failure = failure or error
            except ServiceLost as error:
                lost.append(error)
            else:
                for service, reply in replies.items():
                    reply.write(self.buffers, service)
        if lost:
            raise ServiceLost.joined(lost)
        if failure is not None:
            raise failure
        return time.monotonic_ns() - started
