"""Parts of a long prompt on their way through the model, layer by layer."""

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.engine import Engine


class PromptChunk:
    """One chunk of a request's prompt. Between two layers the engine may run other steps."""

    def __init__(self, engine: Engine, request: ActiveRequest, before: int = 0) -> None:
        """Of `request.chunk_sizes` the one that has so many others before it."""
        self.request = request
        self._engine = engine
        self._first = request.num_done + sum(request.chunk_sizes[:before])
        self._size = request.chunk_sizes[before]
        self._kept: list[np.ndarray] | None = None
        self.next_layer = 0

    def pause(self, for_tokens: int) -> None:
        """Keep what another step of so many tokens would overwrite."""
        if self.next_layer > 0 and self._kept is None:
            self._kept = [rows.copy() for rows in self._shared_rows(for_tokens)]

    def run_layer(self, following: int) -> np.ndarray | None:
        """Run one more layer; after the last one the prompt's logits (V,), if it ends here.

        `request.chunk_sizes` then loses this chunk, the first, and `request.num_done` counts it.
        The engine will be asked for layer `following` next.
        Errors:  ServiceError, RequestError
        """
        engine, request = self._engine, self.request
        first, last = self._first, self._first + self._size
        if self.next_layer == 0:
            engine.place(
                request.tokens[first:last], range(first, last), [request.slot] * self._size
            )
        elif self._kept is not None:
            for rows, kept in zip(self._shared_rows(self._size), self._kept, strict=True):
                rows[: len(kept)] = kept
            self._kept = None
        engine.run_layer(self.next_layer, self._size, following)
        self.next_layer += 1
        if not self.is_done:
            return None
        request.num_done = last
        del request.chunk_sizes[0]
        return engine.logits(self._size, 1)[0] if request.num_left == 0 else None

    @property
    def is_done(self) -> bool:
        """Whether all layers have been run."""
        return self.next_layer == self._engine.config.num_layers

    def _shared_rows(self, most: int) -> list[np.ndarray]:
        buffers = self._engine.exchange.buffers
        num_rows = min(self._size, most)
        return [rows[:num_rows] for rows in (buffers.hidden, buffers.positions, buffers.slots)]


class PromptChunks:
    """The next chunks of a request's prompt, `engine.chunks_at_once` of them side by side.

    A layer is run for each of them before the next layer, so neurons that have to be read for it
    are read once. Each chunk is computed as it is alone.
    """

    def __init__(self, engine: Engine, request: ActiveRequest) -> None:
        """Begin the first of `request.chunk_sizes`."""
        self.request = request
        self._engine = engine
        count = min(engine.chunks_at_once, len(request.chunk_sizes))
        self._chunks = [PromptChunk(engine, request, i) for i in range(count)]
        self._turn = 0

    def pause(self) -> None:
        """Keep what another step of a kernel's tokens would overwrite."""
        self._chunks[self._turn].pause(self._engine.kernel_tokens)

    def run_layer(self) -> np.ndarray | None:
        """Run one more layer of one chunk; see `PromptChunk.run_layer`."""
        chunk = self._chunks[self._turn]
        is_last = self._turn + 1 == len(self._chunks)
        logits = chunk.run_layer(chunk.next_layer + is_last)
        if len(self._chunks) > 1 and not chunk.is_done:
            chunk.pause(self._engine.max_tokens)
        self._turn = 0 if is_last else self._turn + 1
        return logits

    @property
    def is_done(self) -> bool:
        """Whether all layers of all of them have been run."""
        return self._chunks[-1].is_done
