"""A GGUF file of a known shape with random weights, in the formats of files that people have.

    python -m benchmarks.random_gguf OUT.gguf --shape qwen3-30b-a3b --format q4_0 --layers 12

Formats are those that llama.cpp's quantizer gives a file's tensors: with q4_k_m Q6_K for the head,
and for half of the layers' values and down projections, Q4_K for the others; with q4_0 all Q4_0 but
the head; with mxfp4 experts in MXFP4, all else in Q8_0, as in gpt-oss's own files.

Some rows are drawn and quantized, and all layers have them, in other orders: what weights are does
not matter for speed. What is chosen does: neurons fire at the shape's rates, by a part of all gate
rows along what all inputs have in common; a mixture's router, embeddings and head are those of
`hotcold make-model`, so that experts are chosen with a skew, and kept from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.build import build_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sparsity import power_law_rates
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.router import RoutingStats, make_router
from hotcold.model.synthetic.shape import SHAPES as KNOWN
from hotcold.model.synthetic.shape import SyntheticShape, config_json
from hotcold.model.synthetic.topics import Topics

_SEED, _BIAS_SCALE = 2026, 0.1
_UPDATES_RMS = 0.5  # of all layers together, beside 1 of an embedding
_ROWS = 768  # drawn; repeated in larger matrices
_BLOCK_ROWS = 8192  # of the embedding and the head, quantized at once
_Kind = GGMLQuantizationType
FORMATS = {
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "mxfp4": LlamaFileType.MOSTLY_MXFP4_MOE,
}
_MIXTURES = {"qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss",
             "smallthinker": "smallthinker"}  # fmt: skip
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", **_MIXTURES}  # llama.cpp's names of families


def _tiny(family: str) -> SyntheticShape:
    activation: Any = "relu" if family == "smallthinker" else "silu"
    return SyntheticShape(family, 256, 256, 4, 4 if family == "olmoe" else 2, 64, 2048, 512, 8,
                          activation, density=0.4, experts=16, chosen=4)  # fmt: skip


SHAPES = {name: each for name, each in KNOWN.items() if each.family in {"qwen3", *_MIXTURES}}
SHAPES |= {f"tiny-{family}": _tiny(family) for family in _MIXTURES}
SHAPES["tiny"] = SyntheticShape("qwen3", 256, 512, 2, 1, 128, 512, 256, 8, activation="silu")
del SHAPES["tiny-moe"]


def matrix_kind(name: str, file_format: str, layer: int, num_layers: int) -> _Kind:
    """The format of a matrix that llama.cpp's quantizer chooses.

    Source:  llama.cpp, src/llama-quant.cpp, llama_tensor_get_type and use_more_bits
    """
    if file_format in ("f16", "q8_0"):
        return _Kind.F16 if "embd" in name or file_format == "f16" else _Kind.Q8_0
    if file_format == "mxfp4":
        return _Kind.MXFP4 if "_exps" in name else _Kind.Q8_0
    if file_format == "q4_0":
        return _Kind.Q6_K if name == "output" else _Kind.Q4_0
    eighth = num_layers // 8
    is_middle = eighth <= layer < 7 * num_layers // 8 and (layer - eighth) % 3 != 2
    has_more = name.startswith(("attn_v", "ffn_down")) and not is_middle
    return _Kind.Q6_K if has_more or name == "output" else _Kind.Q4_K


def blocks_of(rows: np.ndarray, kind: _Kind) -> np.ndarray:
    """Rows (N, width) float32 as ggml's blocks, (N, bytes) uint8.

    Q4_K, Q5_K and Q6_K, which the gguf package only reads, get one scale for a whole matrix of
    random numbers. Errors: ValueError for widths that are no whole blocks
    """
    items, _ = GGML_QUANT_SIZES[kind]
    if rows.shape[-1] % items:
        raise ValueError(f"rows of {rows.shape[-1]} numbers are no whole blocks of {items}")
    bits = {_Kind.Q4_K: 4, _Kind.Q5_K: 5, _Kind.Q6_K: 6}.get(kind)
    if bits is None:
        return quantize(rows, kind).view(np.uint8)
    step = {4: 0.335, 5: 0.188, 6: 0.104}[bits] * float(rows.std())  # of the least squared error
    middle = 2 ** (bits - 1) + (0.5 if bits == 6 else 0)  # Q6_K's weights are multiples of a step
    levels = np.floor(rows / step + middle).clip(0, 2**bits - 1).astype(np.uint8)
    blocks = levels.reshape(*rows.shape[:-1], -1, items)
    shape = blocks.shape[:-1]
    if bits == 6:  # low nibbles, two high bits, 16 scales, d: d * scale * (level - 32)
        halves = blocks.reshape(*shape, 2, 4, 32)
        low = (halves[..., :2, :] & 15) | (halves[..., 2:, :] & 15) << 4
        high = ((halves >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(-2, dtype=np.uint8)
        parts = [low.reshape(*shape, 128), high.reshape(*shape, 64), np.full(16, 16, np.uint8)]
        parts.append(np.array([step / 16], np.float16).view(np.uint8))
    else:  # d, dmin, scales and minima, high bits, nibbles: d * scale * level - dmin * min
        unit = np.array([step / 32, step * (2**bits - 1) / 64], np.float16)
        scales = np.full(12, 32 | (32 >> 4) << 6, np.uint8)  # 32 of each; low bits in the last 4
        scales[8:] = (32 & 15) * 17
        groups = blocks.reshape(*shape, 4, 2, 32)
        nibbles = (groups[..., 0, :] & 15) | (groups[..., 1, :] & 15) << 4
        by_group = blocks.reshape(*shape, 8, 32) >> 4
        high = (by_group << np.arange(8, dtype=np.uint8)[:, None]).sum(-2, dtype=np.uint8)
        parts = [unit.view(np.uint8), scales, *[high] * (bits == 5), nibbles.reshape(*shape, 128)]
    whole = [np.broadcast_to(part, (*shape, part.shape[-1])) for part in parts]
    return np.concatenate(whole, axis=-1).reshape(*rows.shape[:-1], -1)


class Tensor(NamedTuple):
    """A tensor to write: rows repeated to `shape` in blocks of `kind`, or float32 as it is."""

    name: str
    shape: tuple[int, ...]
    kind: _Kind = _Kind.F32


class RandomModel:
    """The tensors of a file in their order, first their kinds and sizes, then what is in them."""

    def __init__(self, shape: SyntheticShape, config: ModelConfig, file_format: str) -> None:
        self._shape, self._config, self._format = shape, config, file_format
        self._source = NormalSource(_SEED)
        self._topics = Topics.draw(config.vocab_size, config.hidden_size, self._source)
        self._ids, self._text = self._topics.sample(config.vocab_size, self._source)
        self._drawn: dict[tuple[str, _Kind], np.ndarray] = {}
        self._update_rms = _UPDATES_RMS / (2 * config.num_layers) ** 0.5

    def tensors(self) -> Iterator[Tensor]:
        """All tensors' names, shapes and kinds."""
        config, table = self._config, (self._config.vocab_size, self._config.hidden_size)
        yield self._matrix("", "token_embd", table)
        for layer in range(config.num_layers):
            yield from self._layer(layer)
        yield Tensor("output_norm.weight", table[1:])
        yield self._matrix("", "output", table)

    def values(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """What a tensor holds, in parts. They are asked for in the order of `tensors`."""
        role = tensor.name.removesuffix(".weight").split(".", 2)[-1]
        vocab = self._config.vocab_size
        if tensor.kind == _Kind.F32:
            yield self._vector(role, tensor.shape)
        elif role in ("token_embd", "output"):
            if role == "token_embd":
                rows = self._topics.embedding(vocab, self._source)
                self._begin(rows[self._ids])
            else:
                outputs = functional.rms_norm(self._layer_inputs, self._layer_inputs.shape[1:])
                rows = self._topics.head(vocab, outputs, self._text, self._source)
            for part in rows.split(_BLOCK_ROWS):
                yield blocks_of(part.numpy(), tensor.kind)
        else:
            key = (role, tensor.kind)
            if key not in self._drawn:
                self._drawn[key] = blocks_of(self._rows(role, tensor.shape), tensor.kind)
            rows, layer = self._drawn[key], int(tensor.name.split(".")[1])
            parts = tensor.shape[0] if len(tensor.shape) == 3 else 1
            for part in range(parts):  # of each layer and expert, other rows first
                rolled = np.roll(rows, 61 * layer + 97 * part, axis=0)
                yield np.resize(rolled, (tensor.shape[-2], rows.shape[1]))

    def _layer(self, layer: int) -> Iterator[Tensor]:
        config, block = self._config, f"blk.{layer}."
        hidden, keys = config.hidden_size, config.num_kv_heads * config.head_dim

        def vector(name: str, *sizes: int) -> Tensor:
            return Tensor(f"{block}{name}", sizes)

        yield vector("attn_norm.weight", hidden)
        for name, rows, width in (("q", config.attention_size, hidden), ("k", keys, hidden),
                                  ("v", keys, hidden),
                                  ("output", hidden, config.attention_size)):  # fmt: skip
            yield self._matrix(block, f"attn_{name}", (rows, width), layer)
            if config.attention_bias:
                yield vector(f"attn_{name}.bias", rows)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            if config.qk_norm:
                sizes = heads if config.qk_norm == "full" else 1
                yield vector(f"attn_{name}_norm.weight", config.head_dim * sizes)
        if config.has_sinks:
            yield vector("attn_sinks.weight", config.num_heads)
        norm = "post_attention_norm" if self._shape.family == "gpt_oss" else "ffn_norm"
        yield vector(f"{norm}.weight", hidden)
        lead, size, end = (), config.ffn_size, ""
        if config.experts is not None:
            lead, size, end = (config.experts.router.num_experts,), config.experts.size, "_exps"
            yield vector("ffn_gate_inp.weight", *lead, hidden)
            if config.experts.router.has_bias:
                yield vector("ffn_gate_inp.bias", *lead)
        for name, rows, width in (("gate", size, hidden), ("up", size, hidden),
                                  ("down", hidden, size)):  # fmt: skip
            yield self._matrix(block, f"ffn_{name}{end}", (*lead, rows, width), layer)
            if config.ffn_bias:
                yield vector(f"ffn_{name}{end}.bias", *lead, rows)

    def _matrix(self, block: str, role: str, shape: tuple[int, ...], layer: int = 0) -> Tensor:
        kind = matrix_kind(role, self._format, layer, self._config.num_layers)
        return Tensor(f"{block}{role}.weight", shape, kind)

    def _begin(self, embeddings: torch.Tensor) -> None:
        """What layers get: the embeddings of a text, and half of what layers add in all.

        Half of that is the same for all tokens: attention's means over what texts have in common.
        """
        added = self._source.normal(tuple(embeddings.shape), _UPDATES_RMS / 2)
        added += self._source.normal(tuple(embeddings.shape[1:]), _UPDATES_RMS / 2)
        self._layer_inputs = embeddings + added
        self._inputs = functional.rms_norm(self._layer_inputs, embeddings.shape[1:])

    def _vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "ffn_gate_inp":
            spec = self._config.layers[0].ffn.router
            assert spec is not None
            inputs = self._layer_inputs if spec.reads == "layer_input" else self._inputs
            wanted = RoutingStats(self._shape.skew, self._shape.kept)
            self._made = make_router(
                inputs, self._topics, self._text, spec, wanted, None, self._source
            )
            return self._made.rows.numpy()
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        scale = 1.0 if "sinks" in name else _BIAS_SCALE
        scale *= self._update_rms if "down" in name or "output" in name else 1.0
        return self._source.normal(shape, scale).numpy()

    def _rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Some rows of a matrix, scaled for its inputs."""
        count, width = min(_ROWS, int(np.prod(shape[:-1]))), shape[-1]
        if "down" in name or "output" in name:
            return self._source.normal((count, width), self._output_std(name, width)).numpy()
        rows = self._source.normal((count, width), width**-0.5)
        if "gate" in name:
            self._topics.take_out_of(rows)
            across = self._inputs @ rows.T
            along = float((self._inputs @ self._topics.common).mean())
            rates = power_law_rates(count, self._shape.density)
            rates = rates[self._source.permutation(count).numpy()]
            quantiles = torch.special.ndtri(torch.from_numpy(rates)).float()
            rows.addr_(quantiles * float(across.std()) / along, self._topics.common)
            self._gate = rows
        elif "up" in name:
            self._up = rows
        return rows.numpy()

    def _output_std(self, name: str, width: int) -> float:
        """The deviation of rows whose output has that of one update."""
        if name == "attn_output":
            return self._update_rms * width**-0.5
        spec = self._config.layers[0].ffn
        gate, up = (self._inputs @ rows.T for rows in (self._gate, self._up))
        neurons = activated(spec.activation_fn, gate, spec.activation_threshold)
        neurons *= activated_up(spec.activation_fn, up, spec.activation_threshold)
        energy = width * float(neurons.square().mean())
        if spec.router is not None:
            energy *= float(self._made.weights.square().sum(dim=1).mean())
        return self._update_rms * energy**-0.5


def write(out: Path, shape: SyntheticShape, file_format: str) -> None:
    """Write the file, whole or not at all; no more than one matrix is held at a time."""
    config = build_config(config_json(shape, "float16"))
    part = out.with_name(f"{out.name}.part")
    writer = GGUFWriter(str(part), ARCHITECTURES[shape.family])
    _add_keys(writer, config, shape)
    writer.add_file_type(FORMATS[file_format])
    writer.add_tokenizer_model("no_vocab")
    model, sizes = RandomModel(shape, config, file_format), dict[str, int]()
    for name, dims, kind in model.tensors():
        items, size = GGML_QUANT_SIZES[kind]
        sizes[name] = int(np.prod(dims)) // items * size
        writer.add_tensor_info(name, dims, np.dtype(np.float32), sizes[name], kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        file = writer.fout[0]
        with torch.inference_mode():
            for tensor in model.tensors():
                writer.write_padding(file, file.tell())
                for values in model.values(tensor):
                    values.tofile(file)
                writer.write_padding(file, sizes[tensor.name])
        writer.close()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _add_keys(writer: GGUFWriter, config: ModelConfig, shape: SyntheticShape) -> None:
    assert config.rope is not None
    keys: dict[str, int | float] = {
        "block_count": config.num_layers, "context_length": config.max_positions,
        "embedding_length": config.hidden_size, "feed_forward_length": shape.ffn,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "vocab_size": config.vocab_size,
        "rope.freq_base": float(config.rope.theta), "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    if any(config.windows):
        keys["attention.sliding_window"] = max(config.windows)
    if config.experts is not None:
        router = config.experts.router
        keys |= {"expert_count": router.num_experts, "expert_used_count": router.num_chosen,
                 "expert_feed_forward_length": config.experts.size}  # fmt: skip
        keys |= {"expert_gating_func": 2} if router.score == "sigmoid" else {}
    if shape.family == "gpt_oss":
        scaling = config_json(shape, "float16")["rope_scaling"]
        original = scaling["original_max_position_embeddings"]
        writer.add_string(f"{writer.arch}.rope.scaling.type", scaling["rope_type"])
        keys |= {"rope.scaling.factor": float(scaling["factor"]),
                 "rope.scaling.original_context_length": original}  # fmt: skip
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)


def write_like(out: Path, config: ModelConfig, file_format: str) -> None:
    """Write a Llama with random weights and as many bytes in every part as a dense model has.

    For an FFN of two matrices its three have 2/3 of the neurons, a multiple of 32 as any row is.
    """
    if config.experts is not None:
        raise click.UsageError("a mixture is compared by its GGUF file; this program writes one")
    ffn = config.ffn_size if config.has_gate else max(1, round(config.ffn_size / 48)) * 32
    shape = SyntheticShape(
        "llama", config.hidden_size, ffn, config.num_heads, config.num_kv_heads, config.head_dim,
        config.vocab_size, config.max_positions, config.num_layers, activation="silu",
    )  # fmt: skip
    write(out, shape, file_format)


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--shape", "name", type=click.Choice([*SHAPES]), default="qwen3-8b")
@click.option("--format", "file_format", type=click.Choice([*FORMATS]), default="q4_k_m")
@click.option("--layers", type=click.IntRange(min=1), default=8)
@click.option("--density", type=float, help="Share of active neurons; the shape's without it.")
def main(out: Path, name: str, file_format: str, layers: int, density: float | None) -> None:
    """Write OUT."""
    shape = replace(SHAPES[name], layers=layers, density=density or SHAPES[name].density)
    if file_format == "mxfp4" and not shape.experts:
        raise click.UsageError("mxfp4 is a format of experts; give a mixture's --shape")
    write(out, shape, file_format)
    click.echo(f"{out}: {out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
