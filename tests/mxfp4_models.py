"""Tiny gpt-oss models with experts in MXFP4, as published, and the same weights dequantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.tiny_models import MIXTURES, Variant, make_tiny

METHOD = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
WIDE = {"hidden_size": 96, "intermediate_size": 288, "head_dim": 16}


def make_mxfp4(path: Path, variant: str = "gpt-oss", seed: int = 5, **sizes: int) -> Path:
    """Write the model with experts of random MXFP4 to `path`/packed, which is returned.

    The same with what transformers dequantizes them to goes to `path`/floats.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = MIXTURES[variant]
    wide = Variant(made.func, *made.args, **(made.keywords | WIDE | sizes))
    floats, packed = path / "floats", path / "packed"
    with mock.patch.dict(MIXTURES, {"wide": wide}):
        make_tiny("wide", floats)
    tensors = load_file(floats / "model.safetensors")
    pairs = dict(tensors)
    rng = np.random.default_rng(seed)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 124, blocks.shape[:-1], dtype=np.uint8)
        values = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        tensors[name] = values.numpy()
        del pairs[name]
        pairs |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(floats, packed)
    save_file(pairs, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": METHOD}
    (packed / "config.json").write_text(json.dumps(config))
    return packed
