"""Writes a layer's FFN, block by block, and applies it to hidden states.

A dense layer is one block, which all tokens have; a mixture's blocks are its experts. A block's
gate is fitted to the tokens that choose it, or nearly do; its up and down are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.families.tensor_names import ExpertNames, LayerNames
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.sparsity import MAX_DENSITY, hot_share
from hotcold.model.synthetic.gate import LOW_RANK, make_gate_rows
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.router import Router, RoutingStats

_FITTED_TOKENS = 96  # of each block
BIAS_SCALE = 0.1  # of what the bias is added to


@dataclass(frozen=True)
class FiringStats:
    """The share of neurons that fires on tokens that were not fitted, and its skew.

    Of a mixture's, the neurons of chosen experts, and how those are chosen.
    """

    density: float
    hot_share: float  # share of the neurons that makes 80% of the activations
    routing: RoutingStats | None = None


def ffn_names(names: LayerNames, spec: FfnSpec) -> ExpertNames:
    """Return the tensors of a mixture's experts, or of a dense layer's one block."""
    if spec.router is not None:
        return names.experts[0]

    def of(module: str, part: str) -> str:
        return f"{module}.{part}" if module and (part == "weight" or spec.has_biases) else ""

    return ExpertNames(
        router="",
        gate=of(names.gate, "weight"),
        up=of(names.up, "weight"),
        down=of(names.down, "weight"),
        gate_bias=of(names.gate, "bias"),
        up_bias=of(names.up, "bias"),
        down_bias=of(names.down, "bias"),
    )


@dataclass(frozen=True)
class FfnMaker:
    """Writes one layer's blocks and remembers what fires."""

    spec: FfnSpec
    names: ExpertNames
    density: float
    num_fitted: int
    source: NormalSource
    write: Callable[[str, torch.Tensor], None]
    # Of each block: the tokens that have it, their neurons (t, I), which of them fire.
    _tokens: list[torch.Tensor] = field(default_factory=list)
    _neurons: list[torch.Tensor] = field(default_factory=list)
    _fires: list[torch.Tensor] = field(default_factory=list)

    def make(self, x: torch.Tensor, router: Router | None, output_rms: float) -> torch.Tensor:
        """Write all blocks; return what they add for each token, of deviation `output_rms`.

        Shapes:  x and result (T, D), float32
        """
        self._write_gates(x, router)
        all_weights = torch.ones(len(x), 1) if router is None else router.weights
        weights = [all_weights[ids, number] for number, ids in enumerate(self._tokens)]
        energy = sum(
            float((w.square() * h.square().sum(dim=1)).sum())
            for w, h in zip(weights, self._neurons, strict=True)
        )
        std = output_rms * (len(x) / energy) ** 0.5
        return self._write_downs(x, weights, std, output_rms)

    def stats(self, routing: RoutingStats | None) -> FiringStats:
        """How neurons fired on tokens that were not fitted."""
        checked = [ids >= self.num_fitted for ids in self._tokens]
        pairs = zip(self._fires, checked, strict=True)
        counts = torch.stack([fires[is_checked].sum(dim=0) for fires, is_checked in pairs])
        num_choices = sum(int(each.sum()) for each in checked)
        density = float(counts.sum()) / max(1, num_choices * counts.shape[1])
        return FiringStats(density, hot_share(counts.flatten().numpy()), routing)

    def _write_gates(self, x: torch.Tensor, router: Router | None) -> None:
        """Write gate and up, rows (I, D), and their biases (I,); neurons are remembered."""
        names, stacked, biases = self.names, list[torch.Tensor](), list[torch.Tensor]()
        std = 1 / float(x.square().sum(dim=1).mean().sqrt())
        for number, size in enumerate(self.spec.block_sizes):
            gate_bias = self._bias(names.gate_bias, size)
            up_bias = self._bias(names.up_bias, size)
            gate, fc = self._gate(x, router, number, gate_bias)
            up = self.source.normal((size, x.shape[1]), std) if names.up else None
            self._apply(x, up, up_bias, fc)
            if names.is_transposed:  # columns are gate, up, gate, up, ...
                assert up is not None and gate_bias is not None and up_bias is not None
                stacked.append(torch.stack([gate, up], dim=1).flatten(0, 1).T)
                biases.append(torch.stack([gate_bias, up_bias], dim=1).flatten())
                continue
            written = {names.gate: gate, names.gate_bias: gate_bias, names.up: up}
            written |= {names.up_bias: up_bias} | dict(zip(names.predictor, fc, strict=False))
            self._write_block(written, number)
        if stacked:
            self.write(names.gate, torch.stack(stacked))
            self.write(names.gate_bias, torch.stack(biases))

    def _gate(
        self, x: torch.Tensor, router: Router | None, number: int, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return a block's gate, and fc1 (R, D) and fc2 (I, R) of its predictor."""
        spec, density = self.spec, self.density
        if spec.activation_fn == "drelu":  # half of up . x is negative
            density = min(2 * density, MAX_DENSITY)
        ids, inputs, num_fitted = torch.arange(len(x)), x, self.num_fitted
        if router is not None:
            num_fitted = min(_FITTED_TOKENS, self.num_fitted)
            ids = router.weights[:, number].nonzero()[:, 0]
            fitted = router.logits[: self.num_fitted, number].topk(num_fitted).indices
            inputs = x[torch.cat([fitted, ids])]
        rank = predictor_parts(x.shape[1]) if spec.has_predictors else LOW_RANK
        size = spec.block_sizes[number]
        gate = make_gate_rows(inputs, num_fitted, size, density, bias, self.source, rank)
        pre_activations = gate.pre_activations[len(inputs) - len(ids) :]
        self._tokens.append(ids)
        self._fires.append(pre_activations > 0)
        self._neurons.append(
            activated(spec.activation_fn, pre_activations, spec.activation_threshold)
        )
        return gate.rows, gate.predictor

    def _apply(
        self,
        x: torch.Tensor,
        up: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        fc: tuple[torch.Tensor, ...],
    ) -> None:
        """Apply up and predictor to the last block's neurons."""
        spec, x = self.spec, x[self._tokens[-1]]
        if up is not None:
            outputs = functional.linear(x, up, up_bias)
            factors = activated_up(spec.activation_fn, outputs, spec.activation_threshold)
            self._neurons[-1] *= factors
            if spec.activation_fn == "drelu":
                self._fires[-1] &= factors > 0
        if spec.has_predictors:
            fc1, fc2 = fc
            counted = (x @ fc1.T).relu() @ fc2.T > 0
            self._fires[-1] &= counted
            self._neurons[-1] *= counted

    def _write_downs(
        self, x: torch.Tensor, weights: list[torch.Tensor], std: float, output_rms: float
    ) -> torch.Tensor:
        """Write down, rows (D, I); return all blocks' outputs (T, D)."""
        names, hidden, update = self.names, x.shape[1], torch.zeros_like(x)
        stacked, biases = list[torch.Tensor](), list[torch.Tensor]()
        for number, (ids, h) in enumerate(zip(self._tokens, self._neurons, strict=True)):
            down = self.source.normal((hidden, h.shape[1]), std)
            bias = self._bias(names.down_bias, hidden, output_rms)
            out = functional.linear(h, down, bias)
            update.index_add_(0, ids, out * weights[number][:, None])
            if names.is_transposed:
                assert bias is not None
                stacked.append(down.T)
                biases.append(bias)
                continue
            self._write_block({names.down: down, names.down_bias: bias}, number)
        if stacked:
            self.write(names.down, torch.stack(stacked))
            self.write(names.down_bias, torch.stack(biases))
        return update

    def _write_block(self, tensors: Mapping[str, torch.Tensor | None], number: int) -> None:
        for name, tensor in tensors.items():
            if name and tensor is not None:
                self.write(name.format(number), tensor)

    def _bias(self, name: str, num_rows: int, output_rms: float = 1.0) -> torch.Tensor | None:
        return self.source.normal((num_rows,), BIAS_SCALE * output_rms) if name else None


def predictor_parts(hidden: int) -> int:
    """Return r of a predictor of 2 r + 2 parts in each expert: hidden / 4, as TurboSparse has."""
    return max(1, hidden // 8 - 1)
