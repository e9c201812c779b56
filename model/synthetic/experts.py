"""Writes a layer's router and experts, expert by expert, and applies them to hidden states.

An expert's gate is fitted to the tokens that choose it, or nearly do; its up and down are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.families.tensor_names import ExpertNames
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.files.safetensors_writer import SafetensorsWriter
from hotcold.model.sparsity import MAX_DENSITY
from hotcold.model.synthetic.gate import LOW_RANK, make_gate_rows
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.router import Router

_FITTED_TOKENS = 96  # of each expert
_BIAS_SCALE = 0.1


@dataclass(frozen=True)
class _Expert:
    """Gate and up, rows (I, D), their biases (I,), and fc1 (R, D), fc2 (I, R) of a predictor."""

    gate: torch.Tensor
    up: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    predictor: tuple[torch.Tensor, torch.Tensor]


class ExpertsMaker:
    """Writes the experts of one layer in the order of `tensor_specs`, and remembers what fires."""

    def __init__(
        self,
        spec: FfnSpec,
        names: ExpertNames,
        density: float,
        num_fitted: int,
        source: NormalSource,
        writer: SafetensorsWriter,
    ) -> None:
        self._spec = spec
        self._names = names
        self._density = density
        self._num_fitted = num_fitted
        self._source = source
        self._writer = writer
        # Of each expert: the tokens that chose it, their neurons (t, I), which of them fire.
        self._tokens: list[torch.Tensor] = []
        self._neurons: list[torch.Tensor] = []
        self._fires: list[torch.Tensor] = []

    def make(self, x: torch.Tensor, router: Router, output_rms: float) -> torch.Tensor:
        """Write all experts; return what they add for each token, of deviation `output_rms`.

        Shapes:  x and result (T, D), float32
        """
        self._write_gates(x, router)
        weights = [router.weights[ids, e] for e, ids in enumerate(self._tokens)]
        energy = sum(
            float((w.square() * h.square().sum(dim=1)).sum())
            for w, h in zip(weights, self._neurons, strict=True)
        )
        update = torch.zeros_like(x)
        std = output_rms * (len(x) / energy) ** 0.5
        self._write_downs(update, weights, std, output_rms)
        return update

    def counts(self) -> tuple[torch.Tensor, int]:
        """How often each neuron fired on tokens that were not fitted, (E, I), and of how many."""
        checked = [ids >= self._num_fitted for ids in self._tokens]
        counts = [
            fires[is_checked].sum(dim=0)
            for fires, is_checked in zip(self._fires, checked, strict=True)
        ]
        return torch.stack(counts), sum(int(each.sum()) for each in checked)

    def _write_gates(self, x: torch.Tensor, router: Router) -> None:
        names, made = self._names, self._experts(x, router)
        if "{}" in names.gate:
            for number, expert in enumerate(made):
                self._writer.write(names.gate.format(number), expert.gate)
                self._writer.write(names.up.format(number), expert.up)
                for name, rows in zip(names.predictor, expert.predictor, strict=False):
                    self._writer.write(name.format(number), rows)
            return
        biases: list[torch.Tensor] = []

        def parts() -> Iterator[torch.Tensor]:
            for expert in made:
                assert expert.gate_bias is not None and expert.up_bias is not None
                biases.append(torch.stack([expert.gate_bias, expert.up_bias], dim=1).flatten())
                rows = torch.stack([expert.gate, expert.up], dim=1).flatten(0, 1)
                yield rows.T  # gate, up, gate, up, ...

        sizes = self._spec.block_sizes
        self._writer.write_parts(names.gate, (len(sizes), x.shape[1], 2 * sizes[0]), parts())
        self._writer.write(names.gate_bias, torch.stack(biases))

    def _experts(self, x: torch.Tensor, router: Router) -> Iterator[_Expert]:
        """Each expert's gate and up; its neurons are remembered."""
        std = 1 / float(x.square().sum(dim=1).mean().sqrt())
        num_fitted = min(_FITTED_TOKENS, self._num_fitted)
        name, limit = self._spec.activation_fn, self._spec.activation_threshold
        is_drelu = name == "drelu"  # half of up . x is negative
        density = min(2 * self._density, MAX_DENSITY) if is_drelu else self._density
        for number, size in enumerate(self._spec.block_sizes):
            ids = router.weights[:, number].nonzero()[:, 0]
            fitted = router.logits[: self._num_fitted, number].topk(num_fitted).indices
            gate_bias, up_bias = self._bias(size), self._bias(size)
            gate = make_gate_rows(
                x[torch.cat([fitted, ids])],
                num_fitted,
                size,
                density,
                gate_bias,
                self._source,
                predictor_parts(x.shape[1]) if self._spec.has_predictors else LOW_RANK,
            )
            up = self._source.normal((size, x.shape[1]), std)
            pre_activations = gate.pre_activations[num_fitted:]
            factors = activated_up(name, functional.linear(x[ids], up, up_bias), limit)
            fires = pre_activations > 0
            if is_drelu:
                fires &= factors > 0
            neurons = activated(name, pre_activations, limit) * factors
            if self._spec.has_predictors:
                fc1, fc2 = gate.predictor
                counted = (x[ids] @ fc1.T).relu() @ fc2.T > 0
                fires &= counted
                neurons *= counted
            self._tokens.append(ids)
            self._fires.append(fires)
            self._neurons.append(neurons)
            yield _Expert(gate.rows, up, gate_bias, up_bias, gate.predictor)

    def _write_downs(
        self, update: torch.Tensor, weights: list[torch.Tensor], std: float, output_rms: float
    ) -> None:
        """Write down, and add each expert's output to `update` (T, D)."""
        names, hidden, biases = self._names, update.shape[1], list[torch.Tensor]()

        def rows() -> Iterator[torch.Tensor]:
            for number, (ids, h) in enumerate(zip(self._tokens, self._neurons, strict=True)):
                down = self._source.normal((hidden, h.shape[1]), std)
                bias = self._bias(hidden, output_rms)
                if bias is not None:
                    biases.append(bias)
                out = functional.linear(h, down, bias)
                update.index_add_(0, ids, out * weights[number][:, None])
                yield down

        if "{}" in names.down:
            for number, down in enumerate(rows()):
                self._writer.write(names.down.format(number), down)
            return
        sizes = self._spec.block_sizes
        transposed = (down.T for down in rows())
        self._writer.write_parts(names.down, (len(sizes), sizes[0], hidden), transposed)
        self._writer.write(names.down_bias, torch.stack(biases))

    def _bias(self, num_rows: int, output_rms: float = 1.0) -> torch.Tensor | None:
        if not self._spec.has_biases:
            return None
        return self._source.normal((num_rows,), _BIAS_SCALE * output_rms)


def predictor_parts(hidden: int) -> int:
    """Return r of a predictor of 2 r + 2 parts in each expert: hidden / 4, as TurboSparse has."""
    return max(1, hidden // 8 - 1)
