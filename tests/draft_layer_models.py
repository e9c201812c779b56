"""Tiny models with a layer that drafts, and what such a layer says by transformers alone.

The layer is that of a model of one layer, whose final norm is the head's own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.patched_models import load_model
from tests.tiny_models import MIXTURES, VARIANTS, _write

_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5": {**_ONE_LAYER, "layer_types": ["full_attention"]},
    "qwen3.5-moe": {**_ONE_LAYER, "layer_types": ["full_attention"]},
    "glm4-moe-groups": {**_ONE_LAYER, "first_k_dense_replace": 0},
    "deepseek-v3": {**_ONE_LAYER, "first_k_dense_replace": 0},
}


class DraftedModel:
    """A checkpoint at `path` whose last layer drafts; qwen's tensors have names of their own.

    sizes: what its config changes of the variant's
    """

    def __init__(self, variant: str, path: Path, **sizes: Any) -> None:
        self.path, self.variant = path, variant
        made = partial((VARIANTS | MIXTURES)[variant], **sizes)
        _write(made, path, "float32", 0, 1)
        self._alone = path / "alone"  # the model of one layer
        _write(partial(made, **_SIZES[variant]), self._alone, "float32", 5, 1)
        alone = load_file(self._alone / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        layer, is_qwen = config["num_hidden_layers"], variant.startswith("qwen")
        random, size = np.random.default_rng(7), config["hidden_size"]
        offset = 1.0 if is_qwen else 0.0

        def norm() -> np.ndarray:
            return (1 - offset + 0.3 * random.standard_normal(size)).astype(np.float32)

        projection = random.standard_normal((size, 2 * size)) / size**0.5
        self.own = {
            "eh_proj": projection.astype(np.float32),
            "enorm": norm(),
            "hnorm": norm(),
            "shared_head.norm": alone["model.norm.weight"],
        }
        self.tensors = load_file(path / "model.safetensors")
        if not is_qwen:  # tables of its own, which are others or, as in most, the model's
            tables = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
            for name, other in tables.items():
                table = self.tensors[f"{other}.weight"]
                is_other = variant == "deepseek-v3"
                self.own[name] = random.permuted(table, axis=0) if is_other else table
        begin = "model.layers.0."
        of_layer = {n.removeprefix(begin): t for n, t in alone.items() if n.startswith(begin)}
        # As a converter calls them.
        self.added = {f"model.layers.{layer}.{name}": t for name, t in of_layer.items()}
        self.added |= {f"model.layers.{layer}.{name}.weight": t for name, t in self.own.items()}
        written = self.added
        if is_qwen:
            named = {"eh_proj": "fc", "shared_head.norm": "norm"}
            named |= {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
            written = {f"mtp.{named[name]}.weight": t for name, t in self.own.items()}
            written |= {f"mtp.layers.0.{name}": t for name, t in of_layer.items()}
        save_file(self.tensors | written, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        self._offset = offset

    @functools.cached_property
    def _models(self) -> tuple[Any, Any]:
        return load_model(self.path, torch.float32), load_model(self._alone, torch.float32)

    def _normed(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        trunk, _ = self._models
        epsilon = trunk.config.rms_norm_eps
        weight = torch.from_numpy(self.own[name]) + self._offset
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon) * weight

    def draft(self, ids: Sequence[int], count: int, left_out: Collection[int] = ()) -> list[int]:
        """The tokens that the layer guesses after `ids`: all of its rows computed anew each time.

        Row p is of the normed hidden state at p, and of token p + 1; without those `left_out`.
        """
        trunk, alone = self._models
        ids = list(ids)
        projection = torch.from_numpy(self.own["eh_proj"])
        shared = trunk.get_input_embeddings().weight, trunk.lm_head.weight
        names = "embed_tokens", "shared_head.head"
        tables = [torch.from_numpy(self.own[n]) if n in self.own else t
                  for n, t in zip(names, shared, strict=True)]  # fmt: skip
        with torch.no_grad():
            hidden = trunk.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
            for _ in range(count):
                embedded = tables[0][torch.tensor(ids[1:])]
                parts = self._normed("enorm", embedded), self._normed("hnorm", hidden)
                inputs = torch.cat(parts, dim=1) @ projection.T
                rows = inputs[[at for at in range(len(inputs)) if at not in left_out]]
                found = alone.model(inputs_embeds=rows[None]).last_hidden_state[0]
                ids.append(int((tables[1] @ found[-1]).argmax()))
                hidden = torch.cat([hidden, found[-1:]])
        return ids[len(ids) - count :]
