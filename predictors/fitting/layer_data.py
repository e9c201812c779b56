"""The data of a layer's fit: recorded inputs, and their pre-activations.

A pre-activation is above zero where the neuron fires: gate . x, less the threshold of fatrelu; with
drelu the lesser of gate . x and up . x.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import row_bytes
from hotcold.model.errors import ArtifactError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import load_rows
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.predictors.fitting.read_prices import IN_BYTES, ReadPrices
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.sign import SignLayer

_FIT_SHARE, _CALIBRATE_SHARE = 0.7, 0.15  # the rest checks
_MIN_TOKENS = 64


@dataclass(frozen=True)
class Split:
    """Some tokens. Shapes: inputs (T, d), pre_activations (T, N), both float32."""

    inputs: Tensor
    pre_activations: Tensor

    @property
    def fires(self) -> Tensor:
        """Which neurons fire, (T, N) bool."""
        return self.pre_activations > 0


@dataclass(frozen=True)
class LayerData:
    """One layer: gate rows (N, d) float32, their bytes in memory, and three sets of tokens.

    `rows` decide whether neurons fire: the gate's, and with drelu up's after them. The predictor is
    fitted to `fit`, its thresholds to `calibrate`, and its quality is measured on `check`. `prices`
    are those of the bytes that a token reads.
    """

    gate: Tensor
    rows: Tensor
    gate_bytes: int
    fit: Split
    calibrate: Split
    check: Split
    prices: ReadPrices = IN_BYTES

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        layer: int,
        inputs: np.ndarray,
        prices: ReadPrices = IN_BYTES,
    ) -> "LayerData":
        """Read a layer's gate and apply it to its recorded `inputs` (R, d), float16 bits.

        `config` has the gate's format in memory. Tokens are assigned to the sets in turn, so that
        each covers all of the text.
        Errors:  CheckpointError; ArtifactError for too few tokens
        """
        if inputs.shape[0] < _MIN_TOKENS:
            raise ArtifactError(
                f"the inputs of {inputs.shape[0]} tokens were recorded, a predictor needs at least "
                f"{_MIN_TOKENS}; run `hotcold profile` with a longer text or more --inputs"
            )
        x = torch.from_numpy(inputs.view(np.float16).astype(np.float32))
        gate, z = _matmul(x, *load_rows(checkpoint, config, layer, "gate"))
        z -= config.activation_threshold
        rows = gate
        if config.activation_fn == "drelu":
            up, factors = _matmul(x, *load_rows(checkpoint, config, layer, "up"))
            z, rows = torch.minimum(z, factors), torch.cat([gate, up])
        place = torch.arange(x.shape[0]) % 20 / 20
        is_fit = place < _FIT_SHARE
        is_calibrate = ~is_fit & (place < _FIT_SHARE + _CALIBRATE_SHARE - 1e-6)
        is_check = ~is_fit & ~is_calibrate
        fit, calibrate, check = (
            Split(x[chosen], z[chosen]) for chosen in (is_fit, is_calibrate, is_check)
        )
        gate_bytes = gate.shape[0] * row_bytes(config, gate.shape[1], "gate")
        return cls(gate, rows, gate_bytes, fit, calibrate, check, prices)

    def token_cost(self, layer: SignLayer | LowRankLayer, computed: float) -> float:
        """Return the price of what a token reads: the predictor, and the gate rows it selects."""
        own = self.prices.of(layer) * layer.num_bytes
        return own + self.prices.listed * computed * self.gate_bytes

    @property
    def gates_cost(self) -> float:
        """The price of reading all gate rows, without a predictor."""
        return self.prices.gates * self.gate_bytes


def _matmul(x: Tensor, bits: np.ndarray, bias: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the rows as float32, and x @ rows.T + bias: (T, N)."""
    rows = as_float32(bits)
    z = x @ rows.T
    return rows, z + torch.from_numpy(bias) if bias.size else z


def as_float32(bits: np.ndarray) -> Tensor:
    """Weights of any format as a float32 tensor."""
    return torch.from_numpy(bits if bits.dtype == np.float32 else to_float32(bits))
