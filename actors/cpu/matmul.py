"""Matrix products of prefill, over weights that stay bits of their checkpoint's format.

float32 weights multiply as they are, by torch. 16-bit ones multiply as bfloat16 where the CPU is
fast at that, by this project's own kernels or torch's, whichever are faster; else as int16 with
scales where they are multiplied with vectors and the CPU is fast at that, or as float32. Quantized
rows times vectors are integer products, by own kernels too, where those are faster
(`product_choice.py` tries; docs/lab_log.md has figures).

Nothing is computed when it is asked for: what is asked for becomes phases, in their order, and
`run` has all threads go through them (`thread_team.py`). Each thread converts and multiplies rows
of its own: cores then share nothing but the input, which matters where they share no cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hotcold.actors.cpu.integer_matmul import IntegerMatmul
from hotcold.actors.cpu.matmul_choice import choose_matmul
from hotcold.actors.cpu.pair_matmul import PairMatmul, WordMatmul
from hotcold.actors.cpu.thread_team import Phase, ThreadTeam
from hotcold.actors.cpu.torch_matmul import TorchMatmul
from hotcold.actors.protocol.step_sizes import MatmulChoice
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.formats import CHUNK, is_quantized, row_items
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.placement.machine.pinning import pin_thread

_HALVES = (np.uint16, np.int16)
ThreadCores = Sequence[Sequence[int]]
RowsPart = Callable[[int, int], object]  # of the first row and the one after the last


class Way(Protocol):
    """One way to multiply: what it makes of x (T, d), and x @ weights.T of that; see `linear`."""

    def operand(self, x: np.ndarray, weights: np.ndarray) -> Any:
        """What x becomes for such weights; until the next one is asked for."""
        ...

    def linear(self, operand: Any, weights: np.ndarray, out: np.ndarray) -> None:
        """out (T, N) = operand @ weights.T."""
        ...


@dataclass(frozen=True)
class _RowShares:
    """A phase of parts that a thread goes through for its own rows."""

    count: int
    num_threads: int
    parts: list[RowsPart]

    def __call__(self, thread: int) -> None:
        first, last = split_range(self.count, thread, self.num_threads, 1)
        for part in self.parts if first < last else ():
            part(first, last)


class Matmul:
    """Products of a service's weights with the hidden states of many tokens."""

    def __init__(
        self,
        num_threads: int,
        dtypes: Sequence[np.dtype],
        thread_cores: ThreadCores = (),
        choice: MatmulChoice | None = None,
    ) -> None:
        """`num_threads` cores, each with its own rows; thread t kept on thread_cores[t] if any.

        `dtypes`: of the weights. Without a `choice` what is tried out in this process decides.
        """

        def begin(thread: int) -> None:
            torch.set_num_threads(1)
            if thread_cores:
                pin_thread(thread_cores[thread])

        self.num_threads = num_threads
        self._choice = choose_matmul() if choice is None else choice
        self._team = ThreadTeam(num_threads, begin)
        self._phases: list[Phase] = []
        self._scratch: list[np.ndarray] = []
        self._num_allocated = 0
        self._torch = TorchMatmul(num_threads, self.then)
        self._pairs = PairMatmul(num_threads, self.then)
        self._words = WordMatmul(num_threads, self.then)
        self._integers = IntegerMatmul(num_threads, self.then)
        self._dtypes = dtypes
        self._try_out()

    def choose(self, choice: MatmulChoice) -> None:
        """Multiply as `choice` says from now on; between two products."""
        if choice != self._choice:
            self._choice = choice
            self._try_out()

    def _try_out(self) -> None:
        """So that no prompt waits until the kernels are compiled."""
        self._torch.in_bfloat16 = self._choice.bfloat16
        for dtype in self._dtypes:
            if dtype == np.float32:
                continue
            row = np.zeros((1, row_items(dtype, CHUNK)), dtype)
            with self.at_once():
                self.linear(torch.zeros(1, CHUNK), row, np.empty(0, np.float32))
                self.combine(torch.zeros(1, 1), row, torch.empty(1, CHUNK))

    def begin_layer(self) -> None:
        """What `scratch` gave before may be used for something else from now on."""
        self._num_allocated = 0

    def scratch(self, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """An array of whatever was there, until the next `begin_layer`.

        The next layer has the same memory: to be given new memory takes as long as to fill it.
        """
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._num_allocated == len(self._scratch):
            self._scratch.append(aligned_empty((num_bytes,), np.uint8))
        elif self._scratch[self._num_allocated].size < num_bytes:
            self._scratch[self._num_allocated] = aligned_empty((num_bytes,), np.uint8)
        buffer = self._scratch[self._num_allocated]
        self._num_allocated += 1
        return buffer[:num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Run at the end what was asked for within, and nothing of it where building it failed."""
        self._phases = []
        yield
        self.run()

    def then(self, phase: Phase) -> None:
        """Let every thread call `phase` with its number, after what was asked for before."""
        self._phases.append(phase)

    def then_rows(self, count: int, part: RowsPart) -> None:
        """Let every thread call part(first, last) for its share of `count` rows.

        It may read what parts before it made of the same rows: threads do not meet in between.
        """
        last = self._phases[-1] if self._phases else None
        if isinstance(last, _RowShares) and last.count == count:
            last.parts.append(part)
        else:
            self.then(_RowShares(count, self.num_threads, [part]))

    def run(self) -> None:
        """Compute what was asked for."""
        phases, self._phases = self._phases, []
        if phases:
            self._team.run(phases)

    def linear(
        self,
        x: torch.Tensor,
        weights: np.ndarray,
        bias: np.ndarray,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ weights.T + bias, once it has been run.

        Shapes:  x (T, d) contiguous, weights (N, d) or (N, row bytes), bias (N,) or (0,), result
                 (T, N), `out` where it is given
        Dtypes:  x, bias, result float32; weights bits
        """
        out = torch.empty(x.shape[0], weights.shape[0]) if out is None else out
        return self.linears(x, [(weights, bias, out)])[0]

    def linears(
        self, x: torch.Tensor, matrices: Sequence[tuple[np.ndarray, np.ndarray, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """`linear` of one x, which is prepared once, with each (weights, bias, out).

        The weights are of one dtype.
        """
        way = self._way(matrices[0][0].dtype)
        operand = way.operand(x.numpy(), matrices[0][0])
        for weights, bias, out in matrices:
            way.linear(operand, weights, out.numpy())
            if bias.size:
                self._add_bias(torch.from_numpy(bias), out)
        return [out for _, _, out in matrices]

    def layer_linear(
        self,
        x: torch.Tensor,
        rows: LayerRows,
        layer: int,
        bias: np.ndarray,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`linear` with a layer's rows, which may be in two formats."""
        parts = rows.parts(layer)
        if len(parts) == 1:
            return self.linear(x, parts[0], bias, out)
        out = torch.empty(x.shape[0], sum(map(len, parts))) if out is None else out
        first = 0
        for part in parts:
            place = out[:, first : first + len(part)]
            product = self.linear(x, part, bias[first : first + len(part)])
            self.then_rows(len(x), partial(_copy_rows, product, place))
            first += len(part)
        return out

    def combine(self, h: torch.Tensor, rows: np.ndarray, out: torch.Tensor) -> None:
        """out = h @ rows, rows weighted and summed, once it has been run.

        Shapes:  h (T, N) contiguous, rows (N, d) or (N, row bytes), out (T, d)
        Dtypes:  h, out float32; rows bits
        """
        way = self._pairs if self._has_pairs(rows.dtype) else self._torch
        way.combine(h.numpy(), rows, out.numpy())

    def vectors(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray | QuantizedVectors:
        """What kernels multiply `weights` with: x (T, d), or its vectors until the next product."""
        return self._integers.operand(x, weights) if is_quantized(weights.dtype) else x

    def _way(self, dtype: np.dtype) -> Way:
        if is_quantized(dtype) and self._choice.integers:
            return self._integers
        if self._has_pairs(dtype):
            return self._pairs
        return self._words if self._choice.words and dtype in _HALVES else self._torch

    def _has_pairs(self, dtype: np.dtype) -> bool:
        """Whether own kernels multiply them as bfloat16."""
        choice = self._choice
        return choice.bfloat16 and choice.own_bfloat16 and dtype in _HALVES

    def _add_bias(self, bias: torch.Tensor, out: torch.Tensor) -> None:
        self.then_rows(out.shape[0], lambda first, last: out[first:last].add_(bias))


def _copy_rows(source: torch.Tensor, target: torch.Tensor, first: int, last: int) -> None:
    """target[first:last] = source[first:last]."""
    target[first:last] = source[first:last]
