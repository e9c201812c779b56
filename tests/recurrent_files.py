"""Recurrent layers' tensors as llama.cpp's converter writes them, for tests.

Source:  llama.cpp, conversion/qwen.py, mamba.py and granite.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_MAMBA = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_OF_VALUES = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log")


def recurrent_tensors(
    config: dict[str, Any], arch: str, name: str, values: np.ndarray
) -> dict[str, np.ndarray] | None:
    """What a file of `arch` has of the checkpoint's tensor `name`, by the file's names.

    None where the name alone says it.
    """
    if ".linear_attn." in name:
        return _delta_net(config, arch, name, values)
    if name.split(".mixer.")[-1] in _MAMBA or ".mamba." in name:
        return _mamba(config, name.replace(".mixer.", ".mamba."), values)
    if ".shared_mlp." not in name:
        return None
    block = f"blk.{name.split('layers.')[1].split('.')[0]}."
    if ".output_linear." in name:
        return {f"{block}ffn_down.weight": values}
    gate, up = np.split(values, 2)
    return {f"{block}ffn_gate.weight": gate, f"{block}ffn_up.weight": up}


def _mamba(config: dict[str, Any], name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    layer, role = name.split("layers.")[1].split(".mamba.")
    if role == "A_log":
        values = -np.exp(values)
    if role in ("A_log", "D"):
        values = values[:, None]
    elif role == "conv1d.weight":
        values = values[:, 0]
    elif role == "norm.weight":
        values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return {f"blk.{layer}.{_MAMBA[role]}": np.ascontiguousarray(values)}


def _delta_net(
    config: dict[str, Any], arch: str, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    layer, role = name.split("layers.")[1].split(".linear_attn.")
    layer = layer.split(".")[0]
    if role == "A_log":
        values = -np.exp(values)
    elif role == "conv1d.weight":
        values = values[:, 0]
    if role == "in_proj_qkvz.weight":
        qkv, z = _by_parts(config, values)
        return {f"blk.{layer}.attn_qkv.weight": qkv, f"blk.{layer}.attn_gate.weight": z}
    if arch in ("qwen35", "qwen35moe"):
        values = _tiled(config, role, values)
    return {f"blk.{layer}.{_NAMES[role]}": np.ascontiguousarray(values)}


def _by_parts(config: dict[str, Any], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Qwen3-Next's rows, which are by key head, as q | k | v, and z."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    own = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    by_head = rows.reshape(keys, -1, rows.shape[1])
    parts = np.split(by_head, np.cumsum([size, size, own]), axis=1)
    flat = [part.reshape(-1, rows.shape[1]) for part in parts]
    return np.concatenate(flat[:3]), flat[3]


def _tiled(config: dict[str, Any], role: str, values: np.ndarray) -> np.ndarray:
    """Value heads in the order in which ggml repeats key heads: the first of each, then ..."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def swapped(part: np.ndarray) -> np.ndarray:
        by_head = part.reshape(keys, heads // keys, -1, *part.shape[1:])
        return by_head.swapaxes(0, 1).reshape(part.shape)

    if role == "out_proj.weight":
        return swapped(values.T).T
    if role in _OF_VALUES:
        return swapped(values)
    if role in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([values[:first], swapped(values[first:])])
    return values
