"""Make the demo model's FFN sparse, and its neurons' firing rates skewed, by construction.

Training minimises the language model's loss subject to a firing rate for every neuron: neuron 0
of a layer may fire nearly always, the last ones rarely. Each neuron has a price (a Lagrange
multiplier), which rises while it fires more often than its target and falls while it fires less:

    excess[n] = clip(log(rate[n] / target[n]), -1, 1)
    price[n] += PRICE_STEP * excess[n]
    penalty   = sum over layers, neurons n of
                (price[n] + DAMPING * excess[n]) * mean over tokens of sigmoid(gate[n] / s)

Without the damping term the rates swing round their targets.
s is half the layer's root mean square gate, so that shrinking all gates saves nothing. The sigmoid
stands for the step (gate > 0), which has no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

PRICE_STEP, DAMPING = 2e-5, 4e-4
PRICE_LIMIT, REWARD_LIMIT = 5e-3, 1e-3
RATE_MEMORY, SMALLEST_RATE, HIGHEST_RATE = 0.95, 1e-3, 0.95
TOKEN_STRIDE = 4


def target_rates(num_neurons: int, density: float, exponent: float) -> Tensor:
    """A power law of firing rates, min(0.95, c * (n + 1) ** -exponent), with mean `density`.

    Shapes:  returns (num_neurons,), falling
    """
    shape = torch.arange(1, num_neurons + 1, dtype=torch.float64) ** -exponent
    low, high = 0.0, float(num_neurons)
    for _ in range(100):
        scale = (low + high) / 2
        too_dense = float((shape * scale).clamp(max=HIGHEST_RATE).mean()) > density
        low, high = (low, scale) if too_dense else (scale, high)
    return (shape * low).clamp(max=HIGHEST_RATE).float()


@dataclass
class RateControl:
    """Watches gates, prices their neurons, gives the penalty of a forward pass.

    Shapes:  targets (N,), prices and rates (layers, N)
    """

    targets: Tensor
    prices: Tensor
    rates: Tensor
    _soft_rates: list[tuple[int, Tensor]] = field(default_factory=list)
    _fired: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def watching(cls, model: LlamaForCausalLM, density: float, exponent: float) -> "RateControl":
        """A control of all gates of `model`, with target rates as `target_rates` gives them."""
        config, device = model.config, model.device
        targets = target_rates(config.intermediate_size, density, exponent).to(device)
        shape = (config.num_hidden_layers, config.intermediate_size)
        zeros, halves = torch.zeros(shape, device=device), torch.full(shape, 0.5, device=device)
        control = cls(targets, zeros, halves)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.act_fn.register_forward_hook(control._hook(number))
        return control

    def penalty(self) -> Tensor:
        """The penalty of the forward pass since the last call."""
        prices = self.prices + DAMPING * self._excess()
        terms = [(prices[number] * soft).sum() for number, soft in self._soft_rates]
        self._soft_rates.clear()
        return torch.stack(terms).sum()

    def update(self, progress_rate: float) -> None:
        """After an optimizer step: new firing rates, new prices. progress_rate: 0 to 1."""
        for number, fired in self._fired.items():
            self.rates[number].lerp_(torch.stack(fired).mean(0), 1 - RATE_MEMORY)
        self._fired.clear()
        self.prices += PRICE_STEP * progress_rate * self._excess()
        self.prices.clamp_(-REWARD_LIMIT, PRICE_LIMIT)

    def _excess(self) -> Tensor:
        ratio = (self.rates + SMALLEST_RATE) / (self.targets + SMALLEST_RATE)
        return torch.log(ratio).clamp(-1, 1)

    def _hook(self, number: int) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def watch(_module: nn.Module, inputs: tuple[Tensor], _output: Tensor) -> None:
            gate = inputs[0].flatten(0, -2)[::TOKEN_STRIDE].float()
            scale = gate.detach().square().mean().sqrt() / 2 + 1e-6
            self._soft_rates.append((number, torch.sigmoid(gate / scale).mean(0)))
            self._fired.setdefault(number, []).append((gate.detach() > 0).float().mean(0))

        return watch
