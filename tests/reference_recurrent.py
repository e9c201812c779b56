"""Recurrent layers in float64, from a checkpoint's tensors: state by state, in PyTorch.

Written from the families' own code, apart from kernels and loaders: it reads a checkpoint's tensors
by their names alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from hotcold.model.config.families import tensor_names
from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.numba_kernels.load.convert import to_float32


def recurrent_output(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, x: torch.Tensor
) -> torch.Tensor:
    """Return what the layer adds to the residual. Shapes: x, result (T, d) float64."""
    spec, names = config.layers[layer].recurrent, tensor_names(config).of_layer(layer).recurrent
    assert spec is not None and names is not None
    keys, values, length = spec.num_key_heads, spec.num_value_heads, len(x)
    group = values // max(keys, 1)

    def tensor(name: str) -> torch.Tensor:
        stored = np.array(checkpoint.array(name))
        return torch.from_numpy(to_float32(stored.reshape(1, -1)).reshape(stored.shape)).double()

    def linear(module: str, rows: torch.Tensor = x) -> torch.Tensor:
        return functional.linear(rows, tensor(f"{module}.weight"))

    def convolved(rows: torch.Tensor) -> torch.Tensor:
        kernel = tensor(f"{names.conv}.weight").reshape(rows.shape[1], 1, -1)
        bias = tensor(f"{names.conv}.bias") if spec.has_conv_bias else None
        return convolve(rows, kernel, bias)

    if spec.kind == "conv":
        b, c, inner = linear(names.inputs[0]).chunk(3, 1)
        return linear(names.out, c * convolved(b * inner))

    if spec.kind == "mamba":
        size = keys * spec.key_dim
        parts = linear(names.inputs[0]).split(
            [spec.values_size, spec.values_size + 2 * size, values], 1
        )
        z, mixed, dt = parts
        mixed = functional.silu(convolved(mixed))
        v, k, q = mixed.split([spec.values_size, size, size], 1)
        v = v.reshape(length, values, -1)
        k, q = (p.reshape(length, keys, -1).repeat_interleave(group, 1) for p in (k, q))
        dt = functional.softplus(dt + tensor(names.step_bias))
        decays = (-tensor(names.decay).flatten().exp() * dt).exp()
        state, outs = torch.zeros(values, spec.key_dim, spec.value_dim).double(), []
        for t in range(length):
            added = torch.einsum("hk,hv->hkv", k[t], dt[t, :, None] * v[t])
            state = state * decays[t, :, None, None] + added
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        out = torch.stack(outs) + tensor(names.skip).reshape(-1, 1) * v
        out = (out.reshape(length, -1) * functional.silu(z)).reshape(length, keys, -1)
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + config.norm_eps)
        return linear(names.out, out.reshape(length, -1) * tensor(f"{names.norm}.weight").flatten())
    if len(names.inputs) == 1:  # by key head: q, k, the group's v and z
        sizes = [spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim]
        parts = linear(names.inputs[0]).view(length, keys, -1).split(sizes, -1)
        q, k, v, z = (part.reshape(length, -1) for part in parts)
        mixed = torch.cat([q, k, v], 1)
    else:
        mixed, z = (linear(name) for name in names.inputs)
    if len(names.gates) == 1:
        parts = linear(names.gates[0]).view(length, keys, -1).split([group, group], -1)
        b, a = (part.reshape(length, -1) for part in parts)
    else:
        b, a = (linear(name) for name in names.gates)
    rate, bias = -tensor(names.decay).flatten().exp(), tensor(names.step_bias)
    norm = tensor(f"{names.norm}.weight")
    out = delta_net(spec, convolved(mixed), z, b, a, rate, bias, norm, config.norm_eps)
    return linear(names.out, out)


def delta_net(
    spec: RecurrentSpec,
    mixed: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Of convolved queries, keys and values, and three gates of each token: (T, Hv dv)."""
    keys, values, length = spec.num_key_heads, spec.num_value_heads, len(mixed)
    q, k, v = functional.silu(mixed).split(
        [keys * spec.key_dim, keys * spec.key_dim, spec.values_size], 1
    )

    def of_values(part: torch.Tensor) -> torch.Tensor:
        heads = part.reshape(length, keys, spec.key_dim)
        unit = heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + 1e-6)
        if spec.has_tiled_heads:
            return unit.repeat(1, values // keys, 1)
        return unit.repeat_interleave(values // keys, 1)

    q, k = of_values(q) * spec.key_dim**-0.5, of_values(k)
    v, z = (part.reshape(length, values, spec.value_dim) for part in (v, z))
    decays, betas = (rate * functional.softplus(a + bias)).exp(), b.sigmoid()
    state, outs = torch.zeros(values, spec.key_dim, spec.value_dim).double(), []
    for t in range(length):
        state = state * decays[t, :, None, None]
        change = betas[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + epsilon)
    return (out * norm * functional.silu(z)).reshape(length, -1)


def convolve(
    rows: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Each channel of rows (T, C) by itself; kernel (C, 1, taps), of the position itself last."""
    padded = functional.pad(rows.T[None], (kernel.shape[2] - 1, 0))
    return functional.conv1d(padded, kernel, bias, groups=len(kernel))[0].T
