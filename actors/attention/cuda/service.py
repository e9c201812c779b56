"""The GPU service on device="cuda": attention, KV cache, norms, head and hot neurons on a GPU.

Its thread waits at the doorbell like any other, without the GIL. A request's copies and one graph
go on the device's stream; the hot neurons of a layer follow its attention at once, before anybody
has asked for them, so that they are under way while the CPU services are being asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.graphs import GraphCache
from hotcold.actors.attention.cuda.host_part import HostPart
from hotcold.actors.attention.cuda.link import Link
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.neuron_upload import NeuronUpload
from hotcold.actors.attention.cuda.prompt import PromptWork
from hotcold.actors.attention.cuda.step import StepWork, whole_length, whole_step
from hotcold.actors.attention.cuda.times import DeviceTimes
from hotcold.actors.attention.cuda.token_positions import TokenPositions
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.cuda_kernels.device import GPU_FAILED, DeviceFailure
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    COUNT_FFN,
    FFN,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PING,
    ROUND,
    STREAM,
    decode_thresholds,
    next_request,
)


@dataclass(frozen=True)
class _Begun:
    """Hot neurons that are under way: for which question, and what remains to do at the end."""

    question: tuple[int, int, Thresholds]  # layer, tokens, which neurons fire
    event: Any
    land: Callable[[], None]


class CudaService(Service):
    """Serves what `model` holds; the rest of attention and head through `host`, on the CPU."""

    def __init__(
        self,
        name: str,
        index: int,
        device: Device,
        model: CudaModel,
        layout: ArenaLayout,
    ) -> None:
        """Takes work space for requests of `layout`. `host` must be set where the model lacks some
        of attention and head.

        Errors:  DeviceMemoryError
        """
        super().__init__(name, index, num_threads=1)
        self.device_name = f"cuda ({device.name})"
        self.host: HostPart | None = None
        self._device, self._model = device, model
        self._work = StepWork(device, model, layout)
        self._prompts = PromptWork(device, model, self._work.attention_scratch)
        self._neuron_upload: NeuronUpload | None = None
        if layout.bundle_bytes:
            self._neuron_upload = NeuronUpload(device, model, self._prompts, layout)
        self._graphs = GraphCache(device)
        self._places = TokenPositions(device, self._work, layout.max_tokens)
        self._max_tokens = layout.max_tokens
        self._num_fired = device.pinned((2,), np.int32)
        sizes = [0 if part is None else part.num_neurons for part in model.ffn]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.fired_counts = np.zeros(int(self._offsets[-1]), np.int64)
        self._counts = device.pinned((max(sizes),), np.int64)
        self._begun: _Begun | None = None
        self.times = DeviceTimes(device)

    def try_out(self) -> None:
        """Run what takes most memory once, over whatever the arrays hold: what cannot be had is
        found out now, and kernels are compiled.

        Errors:  DeviceMemoryError
        """
        device, work = self._device, self._work
        device.upload(work.place, np.zeros(work.place.shape, np.int32))
        layers = [layer for layer, part in enumerate(self._model.attention) if part is not None]
        hot = [layer for layer, part in enumerate(self._model.ffn) if part is not None]
        hot.sort(key=lambda layer: self._offsets[layer + 1] - self._offsets[layer])
        tokens = self._max_tokens
        with device.stream():
            x = device.empty((tokens, work.width), np.float32)
            x[...] = 0
            place = device.empty((2, tokens), np.int32)
            place[0], place[1] = device.xp.arange(tokens), 0
            if layers:
                work.attention(layers[0], 1, whole_length(1, work.most_length))
                last = tokens - 1
                self._prompts.attention(layers[0], x, place[0], place[1], work.tables, last)
            if hot:
                work.hot(hot[-1], 1, ALL_FIRE)
                part, out = self._model.ffn[hot[-1]], device.empty(x.shape, np.float32)
                assert part is not None
                self._prompts.hot(part, x, out, add=False)
            if self._model.head is not None:
                work.head(1)
        device.wait(device.record(spin=False))

    def prepare(self, layout: ArenaLayout) -> None:
        """Let copies use the arena."""
        self._link = Link(self._device, self._arena)
        self._places.forget()
        self._begun = None
        if self._neuron_upload is not None:
            self._neuron_upload.attach(layout, self._arena, self._link)
        if self.host is not None:
            self.host.attach(layout, self._arena, self.buffers)

    def prepare_prompts(self) -> None:
        """See `Service.prepare_prompts`."""
        if self.host is not None:
            self.host.prepare_prompts()

    def release(self) -> None:
        """Let go of the arena."""
        self._link.close()
        if self.host is not None:
            self.host.stop()

    def device_report(self, measure: bool) -> dict[str, float]:
        """Bytes taken of the device's memory, and ms of its parts since the last call, if they were
        measured; from now on they are with `measure`.
        """
        self.times.measures = measure
        return {"used_bytes": float(self._device.used_bytes())} | self.times.take()

    def serve(self, thread: int, seen: int) -> int:
        """Wait for the next request, without the GIL; all of them are Python's."""
        return int(next_request(self.buffers.cells, self.index, np.int32(seen)))

    def answer_in_python(self) -> None:
        """Answer any request. An error of the device's own is a DeviceFailure."""
        request = self.buffers.requests[self.index]
        operation, layer = int(request[OPERATION]), int(request[LAYER])
        num_tokens = int(request[NUM_TOKENS])
        try:
            if operation == ATTENTION:
                self._attention(layer, num_tokens, decode_thresholds(request))
            elif operation == HEAD:
                self._head(int(request[FIRST_LOGIT]), num_tokens)
            elif operation == FFN and num_tokens <= KERNEL_TOKENS:
                self._hot(layer, num_tokens, decode_thresholds(request))
            elif operation in (FFN, COUNT_FFN):
                self._hot_of_many(layer, num_tokens, counts=operation == COUNT_FFN)
            elif operation == STREAM:
                rounds = int(request[NUM_IDS])
                self._stream(layer, num_tokens, int(request[ROUND]), rounds)
            elif operation != PING:
                raise ValueError(f"{self.name} knows no operation {operation}")
        except Exception as error:
            self._begun = None
            if told := self._device.explain(error):
                raise DeviceFailure(f"{GPU_FAILED}: {told}") from error
            raise

    def _attention(self, layer: int, num_tokens: int, thresholds: Thresholds) -> None:
        self._begun = None
        if self._model.attention[layer] is None:
            self._ask_host()
        elif num_tokens <= KERNEL_TOKENS:
            self._attention_of_few(layer, num_tokens, thresholds)
        else:
            self._attention_of_many(layer, num_tokens)

    def _attention_of_few(self, layer: int, num_tokens: int, thresholds: Thresholds) -> None:
        buffers, work, whole = self.buffers, self._work, whole_step(num_tokens)
        self.times.mark("")
        self._places.put(buffers, num_tokens)
        self._link.upload("hidden", work.hidden, buffers.hidden[:num_tokens], whole)
        self.times.mark("copies")
        longest = int(buffers.positions[:num_tokens].max()) + 1
        length = whole_length(longest, work.most_length)
        key = "attention", layer, whole, length
        self._graphs.run(key, lambda: work.attention(layer, whole, length))
        self.times.mark("attention")
        targets = buffers.mixed[:num_tokens].reshape(-1), buffers.ffn_input[:num_tokens].reshape(-1)
        found = work.mixed_and_input[:, : targets[0].size]
        land = self._link.download("mixed", targets, found)
        self.times.mark("copies")
        done = self._device.record(spin=True)  # nothing else of the system works meanwhile
        if self._model.ffn[layer] is not None:
            self._begun = self._begin_hot(layer, num_tokens, thresholds)
        self._device.wait(done)
        land()

    def _begin_hot(self, layer: int, num_tokens: int, thresholds: Thresholds) -> _Begun:
        work, whole = self._work, whole_step(num_tokens)
        key = "hot", layer, whole, thresholds
        self.times.mark("")
        self._graphs.run(key, lambda: work.hot(layer, whole, thresholds))
        self.times.mark("hot neurons")
        target = self.buffers.partials[self.index, :num_tokens].reshape(-1)
        found = work.partial.reshape(-1)[: target.size]
        land = self._link.download("partial", [target], found)
        self._device.copy_out(self._num_fired, work.num_fired)
        self.times.mark("copies")
        # Threads of CPU services work now: a thread that spins would take a core from them.
        event = self._device.record(spin=False)
        return _Begun((layer, num_tokens, thresholds), event, land)

    def _hot(self, layer: int, num_tokens: int, thresholds: Thresholds) -> None:
        begun, self._begun = self._begun, None
        if begun is None or begun.question != (layer, num_tokens, thresholds):
            x, whole = self.buffers.ffn_input[:num_tokens], whole_step(num_tokens)
            self._link.upload("ffn_input", self._work.outputs(whole)[1], x, whole)
            begun = self._begin_hot(layer, num_tokens, thresholds)
        self._device.wait(begun.event)
        begun.land()
        self.times.collect()
        self.buffers.replies[self.index, [NUM_COMPUTED, NUM_UP]] = self._num_fired

    def _head(self, first: int, last: int) -> None:
        if self._model.head is None:
            self._ask_host()
            return
        num_tokens = last - first
        hidden, work = self.buffers.hidden[first:last], self._work
        target = self.buffers.logits[:num_tokens].reshape(-1)
        if num_tokens <= KERNEL_TOKENS:
            whole = whole_step(num_tokens)
            self.times.mark("")
            self._link.upload("hidden", work.hidden, hidden, whole)
            self.times.mark("copies")
            self._graphs.run(("head", whole), lambda: work.head(whole))
            self.times.mark("head")
            found = work.logits.reshape(-1)[: target.size]
        else:
            with self._device.stream():
                found = self._prompts.head(self._brought(hidden)).reshape(-1)
        land = self._link.download("logits", [target], found)
        self.times.mark("copies")
        self._finish(land)
        self.times.collect()

    def _attention_of_many(self, layer: int, num_tokens: int) -> None:
        buffers = self.buffers
        with self._device.stream():
            positions, slots = self._places.put_prompt(buffers, num_tokens)
            mixed, ffn_input = self._prompts.attention(
                layer,
                self._brought(buffers.hidden[:num_tokens]),
                positions,
                slots,
                self._work.tables,
                int(buffers.positions[num_tokens - 1]),
            )
        lands = [
            self._link.download(name, [target[:num_tokens].reshape(-1)], found.reshape(-1))
            for name, target, found in (
                ("mixed", buffers.mixed, mixed),
                ("ffn_input", buffers.ffn_input, ffn_input),
            )
        ]
        self._finish(*lands)

    def _hot_of_many(self, layer: int, num_tokens: int, counts: bool) -> None:
        """Also of few tokens where neurons that fire are counted."""
        self._begun = None
        part = self._model.ffn[layer]
        assert part is not None
        target = self.buffers.partials[self.index, :num_tokens].reshape(-1)
        size = part.num_neurons
        with self._device.stream():
            x = self._brought(self.buffers.ffn_input[:num_tokens])
            out = self._device.empty(x.shape, np.float32)
            fired = self._device.empty((size,), np.int64) if counts else None
            self._prompts.hot(part, x, out, add=False, counts=fired)
            if fired is not None:
                self._device.copy_out(self._counts[:size], fired)
        self._finish(self._link.download("partial", [target], out.reshape(-1)))
        if counts:
            first = int(self._offsets[layer])
            self.fired_counts[first : first + size] += self._counts[:size]
        self.buffers.replies[self.index, [NUM_COMPUTED, NUM_UP]] = size

    def _stream(self, layer: int, num_tokens: int, number: int, num_rounds: int) -> None:
        """A round of a layer's neurons; the last one ends with the whole FFN's output."""
        self._begun, upload = None, self._neuron_upload
        if upload is None:
            raise ValueError(f"{self.name} was not told that neurons would be brought to it")
        if number == 0:
            with self._device.stream():
                x = self._brought(self.buffers.ffn_input[:num_tokens])
            upload.begin(layer, x)
        elif not upload.is_done(number):
            upload.add(number)
        if number == num_rounds:
            target = self.buffers.partials[self.index, :num_tokens].reshape(-1)
            self._finish(self._link.download("partial", [target], upload.result.reshape(-1)))

    def _brought(self, source: np.ndarray) -> Any:
        """A new array on the device with the rows of `source`, to come."""
        target = self._device.empty(source.shape, np.float32)
        self._link.upload("prompt", target, source, source.shape[0])
        return target

    def _finish(self, *lands: Callable[[], None]) -> None:
        self._device.wait(self._device.record(spin=True))
        for land in lands:
            land()

    def _ask_host(self) -> None:
        assert self.host is not None
        self.host.ask()
