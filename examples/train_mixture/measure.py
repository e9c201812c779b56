"""Measure a trained mixture, on its float16 weights, by the model that was trained.

Text:      perplexity of heldout.txt, in windows of the model's context.
Routes:    what repeats from token to token, how unevenly experts are used, which share of choices
           a cache of the experts used last would have had, beside the experts used most in the
           other half of the text. Each window is a text of its own, the cache goes on.
Ahead:     of the experts of layer l + 1, how many its router chooses from what layer l gets.
Sparsity:  share of relu(gate) that is exactly zero, in the experts that a token chose.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.train_mixture import routes as routed
from examples.train_mixture.model import MixtureForCausalLM, load_mixture
from hotcold.model.sparsity import hot_share


@dataclass
class Watched:
    """What hooks saw. Shapes: fired (layers, experts, N), chosen_times (layers, experts)."""

    fired: Tensor
    chosen_times: Tensor
    layer_inputs: list[Tensor] = field(default_factory=list)  # of one pass


@torch.inference_mode()
def evaluate(folder: Path, keep_routes: Path | None) -> dict:
    """Every figure of the report but the training's own."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = load_mixture(folder)
    config, watched = model.config, watch(model)
    text = (folder / "heldout.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size, total = config.max_position_embeddings - 1, 0.0
    found, ahead = list[np.ndarray](), list[np.ndarray]()
    for start in range(0, len(ids), size):
        window = torch.tensor([[config.bos_token_id, *ids[start : start + size]]])
        watched.layer_inputs.clear()
        logits = model(window, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
        found.append(routes_of(model))
        ahead.append(recall_ahead(model, watched.layer_inputs))
    routes = np.concatenate(found)
    if keep_routes is not None:
        np.save(keep_routes, routes, allow_pickle=False)
    return {
        "model": describe(model, folder),
        "held_out": {
            "tokens": len(ids),
            "perplexity": round(math.exp(total / len(ids)), 2),
            "bits_per_byte": round(total / len(text.encode()) / math.log(2), 3),
        },
        "routes": describe_routes(found, config.num_experts),
        "ahead": [round(float(share), 4) for share in np.mean(ahead, axis=0)],
        "sparsity": describe_sparsity(watched),
    }


def watch(model: MixtureForCausalLM) -> Watched:
    """Count what fires in chosen experts, and keep what layers get, from now on."""
    config, layers = model.config, model.model.layers
    shape = (len(layers), config.num_experts)
    watched = Watched(torch.zeros(*shape, config.intermediate_size), torch.zeros(shape))
    for number, layer in enumerate(layers):

        def see(_module: object, inputs: tuple[Tensor], *_: object) -> None:
            watched.layer_inputs.append(inputs[0].flatten(0, -2))

        layer.register_forward_pre_hook(see)
        for e, expert in enumerate(layer.mlp.experts):

            def count(
                _m: object, _i: object, out: Tensor, at: tuple[int, int] = (number, e)
            ) -> None:
                watched.fired[at] += (out > 0).sum(0)
                watched.chosen_times[at] += len(out)

            expert.act_fn.register_forward_hook(count)
    return watched


def routes_of(model: MixtureForCausalLM) -> np.ndarray:
    """The last pass's experts, int16 (tokens, layers, k)."""
    chosen = [layer.mlp.chosen for layer in model.model.layers]
    return torch.stack(chosen, dim=1).numpy().astype(np.int16)


def recall_ahead(model: MixtureForCausalLM, inputs: list[Tensor]) -> np.ndarray:
    """For each layer but the first, the share of its experts that is found a layer earlier."""
    found = []
    for before, layer in zip(inputs, list(model.model.layers)[1:], strict=False):
        guessed = layer.mlp.primary_router(before).topk(layer.mlp.num_chosen, dim=-1).indices
        hits = (layer.mlp.chosen[:, :, None] == guessed[:, None, :]).any(-1)
        found.append(float(hits.float().mean()))
    return np.array(found)


def describe_routes(windows: list[np.ndarray], num_experts: int) -> dict:
    """Repetition, skew and hits, by layer and in the mean."""
    weights = [len(window) for window in windows if len(window) > routed.WINDOW]
    long = [window for window in windows if len(window) > routed.WINDOW]
    by_layer = {
        window: np.average([routed.kept(each, window) for each in long], axis=0, weights=weights)
        for window in (1, routed.WINDOW)
    }
    routes = np.concatenate(windows)
    halves = np.array_split(routes, 2)
    skew = routed.busier_half(routed.counts(routes, num_experts))
    hits = []
    for share in routed.SHARES:
        fixed = [routed.fixed_hits(halves[i], halves[1 - i], num_experts, share) for i in range(2)]
        lru = routed.lru_hits(routes, num_experts, share)
        hits.append({"resident": share, "lru": round(lru, 4), "fixed": round(sum(fixed) / 2, 4)})
    return {
        "kept": round(float(by_layer[1].mean()), 4),
        "kept_per_layer": np.round(by_layer[1], 4).tolist(),
        f"kept_within_{routed.WINDOW}": round(float(by_layer[routed.WINDOW].mean()), 4),
        "busier_half": round(float(skew.mean()), 4),
        "busier_half_per_layer": np.round(skew, 4).tolist(),
        "hits": hits,
    }


def describe_sparsity(watched: Watched) -> dict:
    """Zeros inside chosen experts, and the share of all neurons that makes 80% of activations."""
    fired = watched.fired.sum((1, 2))
    computed = watched.chosen_times.sum(1) * watched.fired.shape[2]
    return {
        "zeros": round(1 - float(fired.sum() / computed.sum()), 4),
        "zeros_per_layer": [round(1 - float(share), 4) for share in fired / computed],
        "neurons_for_80_percent_share": round(hot_share(watched.fired.flatten().numpy()), 4),
    }


def describe(model: MixtureForCausalLM, folder: Path) -> dict:
    """The model's shape and size."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    of_expert = 3 * config.hidden_size * config.intermediate_size
    idle = (config.num_experts - config.num_chosen) * config.num_hidden_layers * of_expert
    return {
        "parameters": parameters,
        "active_parameters": parameters - idle,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "chosen": config.num_chosen,
        "neurons_per_expert": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "weights_bytes": (folder / "model.safetensors").stat().st_size,
    }
