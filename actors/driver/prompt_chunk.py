"""A part of a long prompt on its way through the model, layer by layer."""

import numpy as np

from actors.driver.active_request import ActiveRequest
from actors.driver.engine import Engine


class PromptChunk:
    """The next chunk of a request's prompt. Between two layers the engine may run other steps."""

    def __init__(self, engine: Engine, request: ActiveRequest) -> None:
        """Begin the first of `request.chunk_sizes`."""
        self.request = request
        self._engine = engine
        self._size = request.chunk_sizes[0]
        self._next_layer = 0
        self._kept: list[np.ndarray] | None = None

    def pause(self) -> None:
        """Keep what another step of a kernel's tokens would overwrite."""
        if self._next_layer > 0 and self._kept is None:
            self._kept = [rows.copy() for rows in self._shared_rows()]

    def run_layer(self) -> np.ndarray | None:
        """Run one more layer; after the last one the prompt's logits (V,), if it ends here.

        `request.chunk_sizes` then loses this chunk, and `request.num_done` counts it.
        Errors:  ServiceError, RequestError
        """
        engine, request = self._engine, self.request
        first, last = request.num_done, request.num_done + self._size
        if self._next_layer == 0:
            engine.place(
                request.tokens[first:last], range(first, last), [request.slot] * self._size
            )
        elif self._kept is not None:
            for rows, kept in zip(self._shared_rows(), self._kept, strict=True):
                rows[:] = kept
            self._kept = None
        engine.run_layer(self._next_layer, self._size)
        self._next_layer += 1
        if not self.is_done:
            return None
        request.num_done = last
        del request.chunk_sizes[0]
        return engine.logits(self._size, 1)[0] if request.num_left == 0 else None

    @property
    def is_done(self) -> bool:
        """Whether all layers have been run."""
        return self._next_layer == self._engine.config.num_layers

    def _shared_rows(self) -> list[np.ndarray]:
        wires = self._engine.exchange.wires
        num_rows = min(self._size, self._engine.kernel_tokens)
        return [rows[:num_rows] for rows in (wires.hidden, wires.positions, wires.slots)]
