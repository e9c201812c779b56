"""The attention service on a GPU: attention, KV cache, norms, head and hot neurons.

Its thread waits at the doorbell without the GIL. A request is copies and one graph on the device's
stream. Layers of which the device has everything, or which it shares with CPU services (`shared`),
are one request and one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device, DeviceTimes, GraphCache
from hotcold.actors.attention.cuda.host_part import HostPart
from hotcold.actors.attention.cuda.link import Link
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.neuron_upload import NeuronUpload
from hotcold.actors.attention.cuda.next_step import NextStep
from hotcold.actors.attention.cuda.predictors import GpuPredictors
from hotcold.actors.attention.cuda.prompt import PromptWork
from hotcold.actors.attention.cuda.shared import SharedLayers
from hotcold.actors.attention.cuda.step import StepWork, TokenPositions, whole_length, whole_step
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.cuda_kernels.device import GPU_FAILED, DeviceFailure
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    COUNT_FFN,
    END_LAYER,
    FFN,
    FIRST_LOGIT,
    GAVE_UP,
    HEAD,
    LAYER,
    LAYERS,
    LISTED,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_LISTED,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PING,
    REQUEST,
    ROUND,
    STREAM,
    WEIGHS_BLOCKS,
    SharedBuffers,
    cell_index,
    decode_thresholds,
    next_request,
)

_COUNTS = [NUM_COMPUTED, NUM_UP, NUM_LISTED]


class CudaAttentionService(Service):
    """Serves what `model` holds of attention and head; `host` serves the rest on the CPU."""

    def __init__(
        self,
        name: str,
        index: int,
        device: Device,
        model: CudaModel,
        layout: ArenaLayout,
        predictors: GpuPredictors | None = None,
        has_core: bool = False,
    ) -> None:
        """Allocates the workspace for `layout`; `host` must be set unless `model` has all parts.

        `has_core`: for its thread, while CPU services work.

        Errors:  DeviceMemoryError
        """
        super().__init__(name, index, num_threads=1)
        self.device_name = f"cuda ({device.name})"
        self.host: HostPart | None = None
        self._device, self._model = device, model
        self._work = StepWork(device, model, layout)
        scratch = self._work.attention_scratch, self._work.router_scratch
        self._prompts = PromptWork(device, model, *scratch)
        self._neuron_upload: NeuronUpload | None = None
        if layout.bundle_bytes:
            self._neuron_upload = NeuronUpload(device, model, self._prompts, layout)
        self._shared, self._predictors = SharedLayers(device), predictors
        self._graphs = GraphCache(device)
        self._positions = TokenPositions(device, self._work, layout.max_tokens)
        self._max_tokens = layout.max_tokens
        self._num_fired = device.pinned(self._work.num_fired.shape, np.int32)
        self._weights = device.pinned(self._work.all_weights.shape, np.float32)
        sizes = [0 if part is None else part.num_neurons for part in model.ffn]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.fired_counts = np.zeros(int(self._offsets[-1]), np.int64)
        self._counts = device.pinned((max(sizes),), np.int64)
        self._has_core = has_core
        self.next_step: NextStep | None = None  # where the device has the whole model
        self.times = DeviceTimes(device)

    def try_out(self) -> None:
        """Run once what needs most memory, on arbitrary values, and compile the kernels.

        Errors:  DeviceMemoryError
        """
        device, work = self._device, self._work
        device.upload(work.place, np.zeros(work.place.shape, np.int32))
        layers = [layer for layer, part in enumerate(self._model.attention) if part is not None]
        layers.sort(key=lambda layer: bool(self._model.layers[layer].numbers.window))
        hot = [layer for layer, part in enumerate(self._model.ffn) if part is not None]
        hot.sort(key=lambda layer: np.diff(self._model.starts[layer]).max())
        tokens = self._max_tokens
        with device.stream():
            x = device.empty((tokens, work.width), np.float32)
            x[...] = 0
            place = device.empty((2, tokens), np.int32)
            last = work.most_length - 1
            place[0], place[1] = device.xp.arange(last + 1 - tokens, last + 1), 0
            if layers:
                work.attention(layers[0], 1, whole_length(1, work.most_length))
                self._prompts.attention(layers[0], x, place[0], place[1], work.tables, last)
            if hot:
                work.hot(hot[-1], 1, ALL_FIRE)
                part, out = self._model.ffn[hot[-1]], device.empty(x.shape, np.float32)
                assert part is not None
                sizes = np.diff(self._model.starts[hot[-1]])
                if sizes.size > 1:  # of all experts the largest one needs most
                    weights = np.zeros((tokens, sizes.size), np.float32)
                    weights[:, sizes.argmax()] = 1
                    self._prompts.hot_blocks(hot[-1], x, weights, out)
                else:
                    self._prompts.hot(part, x, out, add=False)
            if self._model.head is not None:
                work.head(1)
        device.wait(device.record(spin=False))

    def prepare(self, layout: ArenaLayout) -> None:
        """Register the arena for copies."""
        self._link = Link(self._device, self._arena)
        self._positions.forget()
        self._shared.attach(self.buffers, self.index, self._link)
        if self._link.refusal:
            name = self._device.name
            self.device_name = f"cuda ({name}; through pinned memory: {self._link.refusal})"
        self._graphs.clear()
        self._forget_next()
        if self._neuron_upload is not None:
            self._neuron_upload.attach(layout, self._arena, self._link)
        if self.host is not None:
            self.host.attach(layout, self._arena, self.buffers)

    def prepare_prompts(self) -> None:
        """Prepare the host's part for long prompts; the GPU needs nothing."""
        if self.host is not None:
            self.host.prepare_prompts()

    def release(self) -> None:
        """Unregister the arena."""
        self._link.close()
        if self.host is not None:
            self.host.stop()

    def device_report(self, measure: bool) -> dict[str, float]:
        """Bytes of device memory in use, and ms of each part since the last call, if measured.

        `measure`: whether to measure from now on.
        """
        self.times.measures = measure
        return {"used_bytes": float(self._device.used_bytes())} | self.times.take()

    def serve(self, thread: int, seen: int) -> int:
        """Wait for the next request, without the GIL; Python answers all of them."""
        return int(next_request(self.buffers.cells, self.index, np.int32(seen)))

    def answer_in_python(self) -> None:
        """Answer any request. Errors of the device become DeviceFailure."""
        request = self.buffers.requests[self.index]
        operation, layer = int(request[OPERATION]), int(request[LAYER])
        num_tokens = int(request[NUM_TOKENS])
        try:
            if operation != LAYERS:
                self._forget_next()
            if operation == ATTENTION:
                self._attention(layer, num_tokens)
            elif operation == LAYERS:
                layers = range(layer, int(request[END_LAYER]))
                has_head = int(request[FIRST_LOGIT]) < num_tokens
                self._layers(layers, has_head, num_tokens, decode_thresholds.py_func(request))
            elif operation == HEAD:
                self._head(int(request[FIRST_LOGIT]), num_tokens)
            elif operation == FFN and num_tokens <= KERNEL_TOKENS:
                self._hot(layer, num_tokens, decode_thresholds.py_func(request))
            elif operation in (FFN, COUNT_FFN):
                self._hot_of_many(layer, num_tokens, counts=operation == COUNT_FFN)
            elif operation == STREAM:
                rounds = int(request[NUM_IDS])
                self._stream(layer, num_tokens, int(request[ROUND]), rounds)
            elif operation != PING:
                raise ValueError(f"{self.name} knows no operation {operation}")
        except Exception as error:
            with suppress(Exception):  # the first one is told
                self._forget_next()
            self._shared.stop(self._number)
            if reason := self._device.explain(error):
                raise DeviceFailure(f"{GPU_FAILED}: {reason}") from error
            raise

    def _attention(self, layer: int, num_tokens: int) -> None:
        if self._model.attention[layer] is None:
            self._request_host()
        elif num_tokens <= KERNEL_TOKENS:
            self._attention_of_few(layer, num_tokens)
        else:
            self._attention_of_many(layer, num_tokens)

    def _attention_of_few(self, layer: int, num_tokens: int) -> None:
        buffers, work = self.buffers, self._work
        whole, length = self._put_step(buffers, num_tokens)
        key = "attention", layer, whole, length
        self._graphs.run(key, lambda: work.attention(layer, whole, length))
        self.times.mark("attention")
        targets = (
            buffers.ffn_residual[:num_tokens].reshape(-1),
            buffers.ffn_input[:num_tokens].reshape(-1),
        )
        found = work.residual_and_input[:, : targets[0].size]
        land = self._link.download("ffn_residual", targets, found)
        weights = work.block_weights(layer, num_tokens)
        land_weights = self._download_weights(layer, num_tokens, weights)
        self.times.mark("copies")
        self._finish(land, land_weights)

    def _put_step(self, buffers: SharedBuffers, num_tokens: int) -> tuple[int, int]:
        """Put hidden and positions on the stream; returns its graphs' tokens and positions."""
        work, whole = self._work, whole_step(num_tokens)
        self.times.mark("")
        self._positions.put(buffers, num_tokens)
        self._link.upload("hidden", work.hidden, buffers.hidden[:num_tokens], whole)
        self.times.mark("copies")
        longest = int(buffers.positions[:num_tokens].max()) + 1
        return whole, whole_length(longest, work.most_length)

    @property
    def _number(self) -> int:
        """Of the request in the mailbox."""
        return int(self.buffers.cells[cell_index(self.index, REQUEST) * INTS_A_CELL])

    def _listing(self) -> GpuPredictors | None:
        """The predictors, as of now, where the request in the mailbox wants them."""
        is_listed = self.buffers.requests[self.index, NUM_IDS] == LISTED
        if not is_listed or self._predictors is None:
            return None
        if self._predictors.arrange(self.buffers):
            self._graphs.clear()
        return self._predictors

    def _layers(
        self, layers: range, has_head: bool, num_tokens: int, thresholds: Thresholds
    ) -> None:
        work, number = self._work, self._number
        are_shared = not all(map(self._model.is_whole, layers))
        memory = self._shared.memory if are_shared else None
        predictors = self._listing()
        if are_shared and memory is None:
            self._shared.stop(number)
            self.buffers.replies[self.index, NUM_COMPUTED] = GAVE_UP
            return
        if are_shared:
            self._shared.tell(number, num_tokens)

        def launch(buffers: SharedBuffers) -> None:
            which = layers, has_head, *self._put_step(buffers, num_tokens), thresholds
            key = "layers", are_shared, predictors is not None, *which
            self._graphs.run(key, lambda: work.layers(*which, memory, predictors), len(layers))
            self.times.mark("layers")

        step, following = (layers, has_head, thresholds, predictors is not None), self.next_step
        if following is None or not following.takes(step, self.buffers, num_tokens):
            launch(self.buffers)
        outputs = [("ffn_residual", self.buffers.ffn_residual, work.hidden)]
        if has_head:
            outputs.append(("logits", self.buffers.logits, work.logits))
        lands = []
        for name, rows, found in outputs:
            target = rows[:num_tokens].reshape(-1)
            lands.append(self._link.download(name, [target], found.reshape(-1)[: target.size]))
        own = slice(layers.start, layers.stop)
        fired = self._num_fired[own]
        self._device.copy_out(fired.reshape(-1), work.num_fired[own].reshape(-1))
        block_tokens = self.buffers.block_tokens[own]
        weights = self._weights[own, : num_tokens * block_tokens.shape[1]]
        if weights.size:
            self._device.copy_out(weights, work.all_weights[own, : weights.shape[1]])
        self.times.mark("copies")
        # CPU services work meanwhile: spinning may take a core from them.
        self._finish(*lands, spin=self._has_core or not are_shared)
        self.times.collect()
        if are_shared and self._shared.is_stopped(number):
            self.buffers.replies[self.index, NUM_COMPUTED] = GAVE_UP
            return
        if weights.size:  # of layers without experts nobody reads what stands there
            of_tokens = weights.reshape(len(layers), num_tokens, -1)
            np.sum(of_tokens != 0, axis=1, out=block_tokens)
        hot = [at for at, layer in enumerate(layers) if self._model.ffn[layer] is not None]
        self.buffers.replies[self.index, _COUNTS] = fired[hot].sum(axis=0)
        if following is not None and has_head and num_tokens == 1:
            found = following.begin(step, self.buffers)
            if found is not None:
                launch(found)

    def _forget_next(self) -> None:
        if self.next_step is not None:
            self.next_step.forget()

    def _download_weights(self, layer: int, num_tokens: int, found: Any) -> Callable[[], None]:
        """Put a copy of what the layer's blocks weigh on the stream, if it has experts."""
        if not self._model.layers[layer].numbers.num_experts:
            return lambda: None
        target = self.buffers.block_weights[:num_tokens].reshape(-1)
        source = found.reshape(-1)[: target.size]
        return self._link.download("weights", [target], source)

    @property
    def _weighs(self) -> bool:
        """Whether the request weighs blocks."""
        return bool(self.buffers.requests[self.index, WEIGHS_BLOCKS])

    def _hot(self, layer: int, num_tokens: int, thresholds: Thresholds) -> None:
        """Hot neurons of a request's input, and of the blocks that it weighs."""
        work, whole, weighs = self._work, whole_step(num_tokens), self._weighs
        predictors = self._listing()
        if predictors is not None and not predictors.has(layer):
            predictors = None
        self.times.mark("")
        buffers, target = self.buffers, self.buffers.partials[self.index]
        ffn_residual, ffn_input = work.outputs(whole)
        self._link.upload("ffn_input", ffn_input, buffers.ffn_input[:num_tokens], whole)
        if predictors is not None and predictors.reads_residual:
            if self._model.layers[layer].numbers.is_parallel:
                self._link.upload("hidden", work.hidden, buffers.hidden[:num_tokens], whole)
            else:
                residual = buffers.ffn_residual[:num_tokens]
                self._link.upload("ffn_residual", ffn_residual, residual, whole)
        if weighs:
            weights = buffers.block_weights[:num_tokens]
            self._link.upload("block_weights", work.block_weights(layer, whole), weights, whole)
        self.times.mark("copies")

        def launch() -> None:
            masks = work.predict(layer, whole, predictors)
            work.hot(layer, whole, thresholds, weighs, masks=masks)

        key = "hot", layer, whole, thresholds, weighs, predictors is not None
        self._graphs.run(key, launch)
        self.times.mark("hot neurons")
        target = target[:num_tokens].reshape(-1)
        land = self._link.download("partial", [target], work.partial.reshape(-1)[: target.size])
        self._device.copy_out(self._num_fired[layer], work.num_fired[layer])
        self.times.mark("copies")
        # CPU services work now: spinning would take a core from them.
        self._finish(land, spin=False)
        self.times.collect()
        self.buffers.replies[self.index, _COUNTS] = self._num_fired[layer]

    def _head(self, first: int, last: int) -> None:
        if self._model.head is None:
            self._request_host()
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
                found = self._prompts.head(self._uploaded(hidden)).reshape(-1)
        land = self._link.download("logits", [target], found)
        self.times.mark("copies")
        self._finish(land)
        self.times.collect()

    def _attention_of_many(self, layer: int, num_tokens: int) -> None:
        buffers = self.buffers
        with self._device.stream():
            positions, slots = self._positions.put_prompt(buffers, num_tokens)
            ffn_residual, ffn_input, weights = self._prompts.attention(
                layer,
                self._uploaded(buffers.hidden[:num_tokens]),
                positions,
                slots,
                self._work.tables,
                int(buffers.positions[num_tokens - 1]),
            )
        lands = [
            self._link.download(name, [target[:num_tokens].reshape(-1)], found.reshape(-1))
            for name, target, found in (
                ("ffn_residual", buffers.ffn_residual, ffn_residual),
                ("ffn_input", buffers.ffn_input, ffn_input),
            )
        ]
        lands.append(self._download_weights(layer, num_tokens, weights))
        self._finish(*lands)

    def _hot_of_many(self, layer: int, num_tokens: int, counts: bool) -> None:
        """For prompts, and for few tokens when neurons that fire are counted."""
        part = self._model.ffn[layer]
        assert part is not None
        target = self.buffers.partials[self.index, :num_tokens].reshape(-1)
        size, weights = part.num_neurons, self.buffers.block_weights[:num_tokens]
        with self._device.stream():
            x = self._uploaded(self.buffers.ffn_input[:num_tokens])
            out = self._device.empty(x.shape, np.float32)
            fired = self._device.empty((size,), np.int64) if counts else None
            if self._weighs:
                self._prompts.hot_blocks(layer, x, weights, out, counts=fired)
            else:
                self._prompts.hot(part, x, out, add=False, counts=fired)
            if fired is not None:
                self._device.copy_out(self._counts[:size], fired)
        self._finish(self._link.download("partial", [target], out.reshape(-1)))
        if counts:
            first = int(self._offsets[layer])
            self.fired_counts[first : first + size] += self._counts[:size]
        self.buffers.replies[self.index, [NUM_COMPUTED, NUM_UP]] = size

    def _stream(self, layer: int, num_tokens: int, number: int, num_rounds: int) -> None:
        """One round of a layer's neurons; the last round returns the whole FFN's output."""
        upload = self._neuron_upload
        if upload is None:
            raise ValueError(f"{self.name} has no buffers for neuron upload")
        if self.buffers.requests[self.index, WEIGHS_BLOCKS]:
            raise ValueError("neurons are uploaded without their blocks, so they cannot be weighed")
        if number == 0:
            with self._device.stream():
                x = self._uploaded(self.buffers.ffn_input[:num_tokens])
            upload.begin(layer, x)
        elif not upload.is_done(number):
            upload.add(number)
        if number == num_rounds:
            target = self.buffers.partials[self.index, :num_tokens].reshape(-1)
            self._finish(self._link.download("partial", [target], upload.result.reshape(-1)))

    def _uploaded(self, source: np.ndarray) -> Any:
        """A new device array with the rows of `source`, once the stream gets there."""
        target = self._device.empty(source.shape, np.float32)
        self._link.upload("prompt", target, source, source.shape[0])
        return target

    def _finish(self, *lands: Callable[[], None], spin: bool = True) -> None:
        self._device.wait(self._device.record(spin=spin))
        for land in lands:
            land()

    def _request_host(self) -> None:
        assert self.host is not None
        self.host.request()
