"""The activation profile: how often each neuron fires, and each expert is chosen.

Plans and predictors are made from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, UsageError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY, power_law_rates

PROFILE_FILE = "profile.safetensors"
_KIND = "profile"
_STATED_TOKENS = 1_000_000  # of a stated profile: even the rarest neurons have whole counts
_REMEDY = "make it again with `hotcold profile`"


@dataclass(frozen=True, eq=False)
class Rates:
    """The shares of tokens that need rows of each neuron, from 0 to 1.

    chosen: its block is chosen, so its gate is computed; fired: it fires, never more often
    Shapes:  both (L, N) float64, N of the largest layer; 0 where a layer has no such neuron
    """

    chosen: np.ndarray
    fired: np.ndarray


@dataclass(frozen=True, eq=False)
class ActivationProfile:
    """For how many tokens each neuron's gate fired, and each block was chosen.

    `distances` are `StackDistances.counts` of the model's own answers; None, or all 0, where that
    is unknown. `num_tokens` counts the text's tokens, and of a mixture those of its answers, too.
    Shapes:  counts (L, N), N of the largest layer; chosen (L, B), None where no layer has experts;
             distances (experts of all layers,)
    Dtypes:  int64, of counts and chosen from 0 to num_tokens
    """

    counts: np.ndarray
    num_tokens: int
    text_name: str
    text_digest: str
    chosen: np.ndarray | None = None
    distances: np.ndarray | None = None

    @property
    def frequency(self) -> np.ndarray:
        """The share of tokens for which each neuron fires: (L, N) float64, from 0 to 1."""
        return self.counts / self.num_tokens

    def layers(self, config: ModelConfig) -> list[np.ndarray]:
        """The counts of each layer's neurons."""
        return [row[:size] for row, size in zip(self.counts, config.ffn_sizes, strict=True)]

    @property
    def known_distances(self) -> np.ndarray | None:
        """`distances`; None where they are not known."""
        return self.distances if self.distances is not None and self.distances.any() else None

    @property
    def is_stated(self) -> bool:
        """Whether the counts were not measured; `text_name` then says who stated them."""
        return bool(self.text_name) and not self.text_digest

    @property
    def digest(self) -> str:
        """12 hexadecimal digits over the counts, by which plans and predictors name a profile."""
        content = hashlib.sha256(f"{self.num_tokens} {self.counts.shape}".encode())
        content.update(np.ascontiguousarray(self.counts).data)
        if self.chosen is not None:
            content.update(np.ascontiguousarray(self.chosen).data)
        return content.hexdigest()[:12]


def rates_of(config: ModelConfig, profile: ActivationProfile | None) -> Rates:
    """How often rows of each neuron are needed.

    Without a profile all neurons fire, and all experts are chosen equally often.
    """
    blocks = neurons.blocks(config)
    if profile is None or profile.chosen is None:
        of_block = _equal_shares(config)
    else:
        of_block = profile.chosen / profile.num_tokens
    chosen = np.where(blocks < 0, 0.0, np.take_along_axis(of_block, np.maximum(blocks, 0), axis=1))
    return Rates(chosen, chosen if profile is None else profile.frequency)


def firing_share(config: ModelConfig, profile: ActivationProfile) -> float:
    """Of the neurons of blocks that a token chooses, the share that fires."""
    rates = rates_of(config, profile)
    return float(rates.fired.sum() / max(rates.chosen.sum(), 1e-9))


def _equal_shares(config: ModelConfig) -> np.ndarray:
    """The share of tokens that choose each block, if all experts are alike: (L, B) float64."""
    found = np.ones((config.num_layers, neurons.most_blocks(config)))
    for row, layer in zip(found, config.layers, strict=True):
        if (router := layer.ffn.router) is not None:
            row[: router.num_experts] = router.num_chosen / router.num_experts
    return found


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
    tensors = {"counts": profile.counts}
    if profile.chosen is not None:
        tensors["chosen"] = profile.chosen
    if profile.distances is not None:
        tensors["answer_distances"] = profile.distances
    write_artifact(path, _KIND, identity, tensors, facts)


def read_profile(path: Path, identity: ModelIdentity, config: ModelConfig) -> ActivationProfile:
    """Read the profile of the model `identity`.

    Errors:  ArtifactError where it is missing, damaged, of another model or shape, or holds
             impossible counts
    """
    artifact = read_artifact(path, _KIND, identity)
    chosen = distances = None
    if config.experts is not None:
        blocks = config.num_layers, neurons.most_blocks(config)
        chosen = artifact.tensor("chosen", np.int64, blocks)
        if "answer_distances" in artifact.tensors:  # earlier versions counted none, or a text's
            distances = artifact.tensor("answer_distances", np.int64, (config.num_experts,))
    profile = ActivationProfile(
        counts=artifact.tensor("counts", np.int64, neurons.shape(config)),
        num_tokens=artifact.fact("num_tokens", int),
        text_name=artifact.fact("text_name", str),
        text_digest=artifact.fact("text_digest", str),
        chosen=chosen,
        distances=distances,
    )
    _check(path, profile)
    return profile


def stated_profile(
    config: ModelConfig, density: float, why: str, is_even: bool = False
) -> ActivationProfile:
    """A profile by a power law, with mean firing rate `density`, for a model that is not here.

    Inside experts the rates are those while an expert is chosen; all are chosen equally often.
    `why` says where the number comes from. `is_even`: of a model that is here, of which it is not
    known which neurons fire: all as often.
    Errors:  UsageError for a density out of range
    """
    if not MIN_DENSITY <= density <= MAX_DENSITY and density != 1:
        raise UsageError(
            f"--density is {density}; give a share from {MIN_DENSITY} to {MAX_DENSITY}, or 1"
        )
    chosen = _equal_shares(config)
    rates_of_them = "all as often" if is_even else "at rates of a power law"
    rates = np.zeros(neurons.shape(config))
    for row, shares, layer in zip(rates, chosen, config.layers, strict=True):
        end = 0
        for share, size in zip(shares, layer.ffn.block_sizes, strict=False):
            row[end : end + size] = share * (density if is_even else _stated_rates(size, density))
            end += size
    return ActivationProfile(
        np.rint(rates * _STATED_TOKENS).astype(np.int64),
        _STATED_TOKENS,
        f"{density:.3g} of the neurons fire at a token, {rates_of_them} ({why})",
        "",
        None if config.experts is None else np.rint(chosen * _STATED_TOKENS).astype(np.int64),
    )


def _stated_rates(num_neurons: int, density: float) -> np.ndarray:
    return np.ones(num_neurons) if density == 1 else power_law_rates(num_neurons, density)


def _check(path: Path, profile: ActivationProfile) -> None:
    num_tokens = profile.num_tokens
    if num_tokens <= 0:
        raise ArtifactError(f"{path}: a profile of {num_tokens} tokens; {_REMEDY}")
    for counts in (profile.counts, *([] if profile.chosen is None else [profile.chosen])):
        if counts.ndim != 2 or counts.dtype != np.int64 or counts.size == 0:
            raise ArtifactError(f"{path}: counts are {counts.dtype} {counts.shape}; {_REMEDY}")
        if counts.min() < 0 or counts.max() > num_tokens:
            raise ArtifactError(
                f"{path}: counts are from {counts.min()} to {counts.max()}, not from 0 to the "
                f"{num_tokens} tokens; {_REMEDY}"
            )
    if profile.distances is not None and not profile.distances.min(initial=0) >= 0:
        raise ArtifactError(f"{path}: distances of experts are counted below 0; {_REMEDY}")
