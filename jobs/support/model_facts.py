"""The facts that `hotcold show` prints, from the headers of a model's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import PREDICTED_MODES
from hotcold.actors.setup.choose import default_mode
from hotcold.actors.setup.modes import has_thresholds, keeps_down_outputs, own_thresholds, promise
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.actors.setup.preflight import read_model, smaller_dtypes
from hotcold.model.byte_sizes import binary_text, size_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.sparsity import known_firing_share
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.model.weights.check import stored_config, why_no_drafts
from hotcold.model.weights.down_outputs import has_down_outputs
from hotcold.model.weights.sizes import (
    kv_cache_bytes,
    num_parameters,
    num_unchosen_parameters,
    recurrent_page_bytes,
    stored_bytes,
    weight_bytes,
)
from hotcold.placement.profile import firing_share
from hotcold.predictors.powerinfer import has_predictors
from hotcold.predictors.predictor_file import predictors_path

_KV_DTYPE = "float16"
_OF_CONFIG = (
    "name", "family", "num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads",
    "vocab_size", "max_positions", "dtype", "activation_fn", "has_gate", "is_sparse",
)  # fmt: skip
_NO_ZEROS = "no activation is exactly zero, so every neuron is computed"


def facts_of(path: Path) -> dict[str, Any]:
    """The facts, as JSON can hold them. Errors: ConfigError, CheckpointError"""
    config, checkpoint = read_model(path), Checkpoint(path)
    tokenizer = Tokenizer.from_model(path)
    mode = default_mode(config)
    transposed = keeps_down_outputs(mode, config) and has_down_outputs(checkpoint, config)
    served = stored_config(checkpoint, config, down_transposed=transposed)
    parameters, known = num_parameters(checkpoint, config), known_firing_share(config)
    return {
        "path": str(path),
        **{name: getattr(config, name) for name in _OF_CONFIG},
        "num_layers": config.num_layers // (1 + config.has_ffn_pairs),
        "num_parameters": parameters,
        "num_active_parameters": parameters - num_unchosen_parameters(config),
        "experts": _experts(config),
        "kv_bytes_a_token": kv_cache_bytes(config, 1, _KV_DTYPE),
        "kv_bytes_beyond_windows": kv_cache_bytes(config, 1, _KV_DTYPE, 0),
        "window": max(config.windows, default=0),
        "state_bytes": recurrent_page_bytes(config),
        "stored_bytes": stored_bytes(checkpoint),
        "weight_bytes": weight_bytes(served),
        "conversion": checkpoint.conversion_note(dict(served.mean_row_bytes)),
        "quantized_bytes": {
            dtype: weight_bytes(smaller) for dtype, smaller in smaller_dtypes(path)
        },
        "firing_share": _firing_share(path, config) if config.is_sparse else None,
        "published_share": known[0] if known else None,
        "share_source": known[1] if known else None,
        "drafts": not why_no_drafts(checkpoint, config),
        "mode": mode,
        "thresholds": _thresholds(path, config),
        "predictors": _predictors(path, config),
        "has_tokenizer": tokenizer is not None,
        "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }


def lines_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts as lines: names and texts."""
    yield "model", f"{facts['name']}, in {facts['path']}"
    yield "family", facts["family"]
    ffn = "" if facts["experts"] else f"FFN {facts['ffn_size']}, "
    yield (
        "sizes",
        f"{_weights(facts)}: {facts['num_layers']} layers of d "
        f"{facts['hidden_size']}, {ffn}{facts['num_heads']} heads "
        f"({facts['num_kv_heads']} of keys and values), vocabulary {facts['vocab_size']}",
    )
    if facts["experts"]:
        yield "experts", _expert_words(facts)
    stored = facts["stored_bytes"]
    formats = ", ".join(f"{size_text(size)} of {name}" for name, size in stored.items())
    yield "files", formats
    if facts["conversion"]:
        yield "read as", facts["conversion"]
    quantized = (f"{size_text(size)} with --dtype {name}"
                 for name, size in facts["quantized_bytes"].items())  # fmt: skip
    yield (
        "weights",
        ", ".join((f"{facts['dtype']}, {size_text(facts['weight_bytes'])} in memory", *quantized)),
    )
    context = (
        f"{facts['max_positions']} tokens of {binary_text(facts['kv_bytes_a_token'])} of memory"
    )
    if facts["window"]:
        beyond = binary_text(facts["kv_bytes_beyond_windows"])
        context += f", {beyond} beyond windows of {facts['window']}"
    if facts["state_bytes"]:
        context += f", and {binary_text(facts['state_bytes'])} a request for states"
    yield "context", context
    yield (
        "embeddings",
        f"{facts['hidden_size']} numbers: the mean of the hidden states after the last layer",
    )
    yield "activation", facts["activation_fn"] + (" of a gate" if facts["has_gate"] else "")
    yield "sparsity", _sparsity(facts)
    yield "mode", _mode(facts)
    if facts["drafts"]:
        yield "drafts", "a layer after the last guesses tokens ahead (MTP), for --speculate"
    said = "yes" if facts["has_chat_template"] else "no: it goes on with a text"
    yield "chat", said if facts["has_tokenizer"] else "no tokenizer: prompts are token ids"


def _experts(config: ModelConfig) -> dict[str, Any] | None:
    """What is said of a mixture's experts; None of another model."""
    experts = config.experts
    if experts is None:
        return None
    chosen = experts.router.num_chosen * experts.size + experts.shared_size
    layers = [layer.ffn for layer in config.layers]
    computed = sum(ffn.num_neurons if ffn.router is None else chosen for ffn in layers)
    return {
        "num_experts": experts.router.num_experts,
        "num_chosen": experts.router.num_chosen,
        "size": experts.size,
        "shared_size": experts.shared_size,
        "num_dense_layers": sum(config.ffn_sizes[layer] > 0 for layer in experts.dense_layers),
        "is_routed_early": experts.router.reads == "layer_input",
        "has_predictors": experts.has_predictors,
        "chosen_share": computed / config.num_neurons,  # of all layers' neurons
    }


def _weights(facts: dict[str, Any]) -> str:
    text = f"{facts['num_parameters'] / 1e6:,.2f} million weights"
    if not facts["experts"]:
        return text
    return f"{text}, of which a token takes {facts['num_active_parameters'] / 1e6:,.2f} million"


def _expert_words(facts: dict[str, Any]) -> str:
    experts = facts["experts"]
    text = (
        f"{experts['num_experts']} of {experts['size']} neurons a layer, of which a token chooses "
        f"{experts['num_chosen']}"
    )
    if experts["shared_size"]:
        text += f", and one of {experts['shared_size']} that all tokens share"
    if experts["num_dense_layers"] == facts["num_layers"]:
        text += f"; beside them each layer has an FFN of {facts['ffn_size']}"
    elif experts["num_dense_layers"]:
        plural = "s have" if experts["num_dense_layers"] > 1 else " has"
        text += f"; {experts['num_dense_layers']} layer{plural} an FFN of {facts['ffn_size']}"
    if experts["is_routed_early"]:
        text += "; they are chosen before attention"
    return text


def _sparsity(facts: dict[str, Any]) -> str:
    experts = facts["experts"]
    if experts is None:
        return _sparsity_of("neurons", facts)
    text = f"a token chooses experts with {experts['chosen_share']:.1%} of the neurons"
    if not facts["is_sparse"]:
        return f"{text}; within them no activation is exactly zero"
    if experts["has_predictors"]:
        text += ", and predictors in them leave out more"
    return f"{text}; {_sparsity_of('their neurons', facts)}"


def _sparsity_of(neurons: str, facts: dict[str, Any]) -> str:
    if not facts["is_sparse"]:
        return _NO_ZEROS
    share, stated = facts["firing_share"], facts["published_share"]
    if share is not None:
        return f"{share:.1%} of {neurons} fire, as profiled"
    skipped = f"{neurons} whose activation is zero are skipped; `hotcold profile` counts them"
    if stated is None:
        return skipped
    return f"about {stated:.0%} of {neurons} fire, {facts['share_source']}; {skipped}"


def _mode(facts: dict[str, Any]) -> str:
    if facts["mode"] == "dense":
        why = "all neurons of the chosen experts are computed" if facts["experts"] else _NO_ZEROS
        found = facts["thresholds"]
        return f"dense: {why}" + (f". --mode threshold: {found}" if found else "")
    whose = "all neurons of the chosen experts" if facts["experts"] else "all neurons"
    text = f"exact: gates of {whose}, then only those that fire; the same result as dense"
    if facts["predictors"]:
        kinds = " or ".join(f"--mode {kind}" for kind in facts["predictors"])
        text += (
            f". It has predictors: {kinds} skips gates too (--mode auto tries whether it is faster)"
        )
    return text


def _thresholds(path: Path, config: ModelConfig) -> str | None:
    """What --mode threshold promises, or what it needs; None where it is not for such a model."""
    if not has_thresholds(config):
        return None
    try:
        found = own_thresholds(path, config)
    except ArtifactError as problem:
        return str(problem)
    if found is None:
        asked = " --target-kl 0.03" if config.experts is not None else ""
        return f"needs thresholds, which `hotcold profile{asked}` calibrates"
    return promise(found, config)


def _predictors(path: Path, config: ModelConfig) -> list[str]:
    """The modes that have predictors: beside the model, or in its checkpoint."""
    found = [kind for kind in PREDICTED_MODES if predictors_path(path, kind).exists()]
    if "lowrank" not in found and has_predictors(path, config):
        found.append("lowrank")
    return found


def _firing_share(path: Path, config: ModelConfig) -> float | None:
    """The share of neurons that fire at a token, where a profile lies beside the model."""
    try:
        profile = own_profile(path, config)
    except ArtifactError:
        return None
    return None if profile is None else firing_share(config, profile)
