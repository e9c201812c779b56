"""The activation profile: how often each neuron fires. Plans and predictors are made from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, UsageError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY, power_law_rates

PROFILE_FILE = "profile.safetensors"
_KIND = "profile"
_STATED_TOKENS = 1_000_000  # of a stated profile: even the rarest neurons have whole counts
_REMEDY = "make it again with `hotcold profile`"


@dataclass(frozen=True, eq=False)
class ActivationProfile:
    """For how many of a text's tokens each neuron's gate fired.

    Shapes:  counts (L, N)
    Dtypes:  counts int64, each from 0 to num_tokens
    """

    counts: np.ndarray
    num_tokens: int
    text_name: str
    text_digest: str

    @property
    def frequency(self) -> np.ndarray:
        """The share of tokens for which each neuron fires: (L, N) float64, from 0 to 1."""
        return self.counts / self.num_tokens

    @property
    def is_stated(self) -> bool:
        """Whether the counts were not measured; `text_name` then says who stated them."""
        return bool(self.text_name) and not self.text_digest

    @property
    def digest(self) -> str:
        """12 hexadecimal digits over the counts, by which plans and predictors name a profile."""
        content = hashlib.sha256(f"{self.num_tokens} {self.counts.shape}".encode())
        content.update(np.ascontiguousarray(self.counts).data)
        return content.hexdigest()[:12]


def write_profile(path: Path, identity: ModelIdentity, profile: ActivationProfile) -> None:
    """Write `profile` for the model `identity`; its default place is artifact_path(PROFILE_FILE).

    Errors:  ArtifactError where it cannot be written or holds impossible counts
    """
    _check(path, profile)
    facts = {
        "num_tokens": profile.num_tokens,
        "text_name": profile.text_name,
        "text_digest": profile.text_digest,
    }
    write_artifact(path, _KIND, identity, {"counts": profile.counts}, facts)


def read_profile(path: Path, identity: ModelIdentity, config: ModelConfig) -> ActivationProfile:
    """Read the profile of the model `identity`.

    Errors:  ArtifactError where it is missing, damaged, of another model or shape, or holds
             impossible counts
    """
    artifact = read_artifact(path, _KIND, identity)
    profile = ActivationProfile(
        counts=artifact.tensor("counts", np.int64, (config.num_layers, config.ffn_size)),
        num_tokens=artifact.fact("num_tokens", int),
        text_name=artifact.fact("text_name", str),
        text_digest=artifact.fact("text_digest", str),
    )
    _check(path, profile)
    return profile


def stated_profile(config: ModelConfig, density: float, why: str) -> ActivationProfile:
    """A profile by a power law, with mean firing rate `density`, for a model that is not here.

    `why` says where the number comes from.
    Errors:  UsageError for a density out of range
    """
    if not MIN_DENSITY <= density <= MAX_DENSITY and density != 1:
        raise UsageError(
            f"--density is {density}; give a share from {MIN_DENSITY} to {MAX_DENSITY}, or 1"
        )
    rates = np.ones(config.ffn_size) if density == 1 else power_law_rates(config.ffn_size, density)
    counts = np.rint(rates * _STATED_TOKENS).astype(np.int64)
    return ActivationProfile(
        np.repeat(counts[None], config.num_layers, axis=0),
        _STATED_TOKENS,
        f"{density:.3g} of the neurons fire at a token, at rates of a power law ({why})",
        "",
    )


def _check(path: Path, profile: ActivationProfile) -> None:
    counts, num_tokens = profile.counts, profile.num_tokens
    if num_tokens <= 0:
        raise ArtifactError(f"{path}: a profile of {num_tokens} tokens; {_REMEDY}")
    if counts.ndim != 2 or counts.dtype != np.int64 or counts.size == 0:
        raise ArtifactError(f"{path}: counts are {counts.dtype} {counts.shape}; {_REMEDY}")
    if counts.min() < 0 or counts.max() > num_tokens:
        raise ArtifactError(
            f"{path}: counts are from {counts.min()} to {counts.max()}, not from 0 to the "
            f"{num_tokens} tokens; {_REMEDY}"
        )
