"""The FFN inputs that `hotcold profile` records, to which predictors are fitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact

INPUTS_FILE = "inputs.safetensors"
_KIND = "inputs"
_REMEDY = "make it again with `hotcold profile`"
_INFINITE = 0x7C00  # all exponent bits of float16: infinite, or not a number


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The input of each layer's FFN for some tokens, spread evenly over a text.

    Shapes:  inputs (L, R, d), the same R tokens in every layer
    Dtypes:  inputs uint16, float16 bits, all finite
    """

    inputs: np.ndarray
    num_tokens: int  # of the whole text
    text_digest: str


def write_inputs(path: Path, identity: ModelIdentity, inputs: LayerInputs) -> None:
    """Write `inputs` of the model `identity`; the default place is artifact_path(INPUTS_FILE).

    Errors:  ArtifactError where it cannot be written, or inputs are not finite float16 bits
    """
    _check(path, inputs)
    facts = {"num_tokens": inputs.num_tokens, "text_digest": inputs.text_digest}
    write_artifact(path, _KIND, identity, {"inputs": inputs.inputs}, facts)


def read_inputs(path: Path, identity: ModelIdentity, config: ModelConfig) -> LayerInputs:
    """Read the recorded inputs of the model `identity`.

    Errors:  ArtifactError where it is missing, damaged, of another model or shape, or not finite
    """
    artifact = read_artifact(path, _KIND, identity)
    found = artifact.tensors.get("inputs")
    num_recorded = found.shape[1] if found is not None and found.ndim == 3 else 0
    shape = (config.num_layers, num_recorded, config.hidden_size)
    inputs = LayerInputs(
        inputs=artifact.tensor("inputs", np.uint16, shape),
        num_tokens=artifact.fact("num_tokens", int),
        text_digest=artifact.fact("text_digest", str),
    )
    _check(path, inputs)
    return inputs


def _check(path: Path, inputs: LayerInputs) -> None:
    array = inputs.inputs
    if array.ndim != 3 or array.dtype != np.uint16 or array.size == 0:
        raise ArtifactError(f"{path}: inputs are {array.dtype} {array.shape}; {_REMEDY}")
    if inputs.num_tokens < array.shape[1]:
        raise ArtifactError(
            f"{path}: holds {array.shape[1]} tokens of a text of {inputs.num_tokens}; {_REMEDY}"
        )
    # Layer by layer: the mask of all would take half as much memory as the inputs.
    if any(((layer & _INFINITE) == _INFINITE).any() for layer in array):
        raise ArtifactError(f"{path}: holds numbers that are not finite; {_REMEDY}")
