"""A GGUF file of a known shape with random weights, in the formats of files that people have.

    python -m benchmarks.random_gguf OUT.gguf --shape qwen3-30b-a3b --format q4_0 --layers 12

Formats are those that llama.cpp's quantizer gives a file's tensors: with q4_k_m Q6_K for the head,
and for half of the layers' values and down projections, Q4_K for the others; with q4_0 all Q4_0 but
the head; with mxfp4 experts in MXFP4, all else in Q8_0, as in gpt-oss's own files.

Of weights one layer is drawn, and all have it, in other orders: for speed it does not matter. What
is chosen does: that layer, embeddings and head are those of `hotcold make-model`, so neurons fire
at the shape's rates, and experts are chosen with a skew, and kept from token to token.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

from hotcold.model.config.build import build_config
from hotcold.model.config.families import GGUF_ARCHITECTURES
from hotcold.model.config.families.tensor_names import GGUF_NAMES, ExpertNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.synthetic.shape import SHAPES as KNOWN
from hotcold.model.synthetic.shape import SyntheticShape, config_json
from hotcold.model.synthetic.weights import RandomModel

_SEED = 2026
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
    return SyntheticShape(family, 256, 256, 4, 4 if family == "olmoe" else 2, 64, 2048, 512, 8,
                          density=0.4, experts=16, chosen=4)  # fmt: skip


SHAPES = {name: each for name, each in KNOWN.items() if each.family in {"qwen3", *_MIXTURES}}
SHAPES |= {f"tiny-{family}": _tiny(family) for family in _MIXTURES}
SHAPES["tiny"] = SyntheticShape("qwen3", 256, 512, 2, 1, 128, 512, 256, 8)
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


def _experts(
    drawn: dict[str, np.ndarray], layout: ExpertNames, count: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Gate, up and down of all experts (E, rows, columns), by roles."""
    if "{}" in layout.gate:
        for role in ("gate", "up", "down"):
            name = getattr(layout, role)
            yield role, np.stack([drawn[name.format(number)] for number in range(count)])
        return
    for number, role in enumerate(("gate", "up")):  # gpt-oss: transposed, in turn
        yield role, drawn[layout.gate].swapaxes(1, 2)[:, number::2]
        yield f"{role}_bias", drawn[layout.gate_bias][:, number::2]
    yield "down", drawn[layout.down].swapaxes(1, 2)
    yield "down_bias", drawn[layout.down_bias]


def layer_of(model: RandomModel) -> dict[str, np.ndarray]:
    """The middle layer's tensors by llama.cpp's names."""
    config, layer = model.config, model.config.num_layers // 2
    drawn = {tensor.name: tensor.draw().numpy() for tensor in model.layer(layer)}
    prefix, ours = model.names.layers.format(layer), model.names.of_layer(layer)
    theirs = GGUF_NAMES.layer
    _, architecture = GGUF_ARCHITECTURES[ARCHITECTURES[config.family]]
    found = dict[str, np.ndarray]()
    roles = ("norm", "ffn_norm", "q_norm", "k_norm", "out", "gate", "up", "down")
    pairs = [(getattr(ours, role), getattr(theirs, role)) for role in roles]
    for name, usual in [*pairs, *zip(ours.qkv, theirs.qkv, strict=True)]:
        target = architecture.names.get(name.removeprefix(prefix), usual)
        for part in ("weight", "bias"):
            if f"{name}.{part}" in drawn:
                found[f"{target}.{part}"] = drawn[f"{name}.{part}"]
    if ours.sinks:
        found[f"{theirs.sinks}.weight"] = drawn[ours.sinks]
    if config.experts is not None:
        layout, target = ours.experts[0], theirs.experts[0]
        found |= {target.router: drawn[layout.router]}
        if layout.router_bias in drawn:
            found[target.router_bias] = drawn[layout.router_bias]
        for role, rows in _experts(drawn, layout, config.experts.router.num_experts):
            found[getattr(target, role)] = rows
    return found


def write(out: Path, shape: SyntheticShape, file_format: str, head: _Kind | None = None) -> None:
    """Write the file, whole or not at all; `head`: its format, else the quantizer's."""
    config = build_config(config_json(shape, "float16"))
    part = out.with_name(f"{out.name}.part")
    writer = GGUFWriter(str(part), ARCHITECTURES[shape.family])
    _add_keys(writer, config, shape)
    writer.add_file_type(FORMATS[file_format])
    writer.add_tokenizer_model("no_vocab")
    with torch.inference_mode():
        model = RandomModel(config, shape, _SEED)
        ends, layer = {"token_embd": model.embedding(), "output": model.head()}, layer_of(model)
    parts: list[tuple[str, np.ndarray, int, _Kind]] = []  # with the layer and the format
    for name, rows in ends.items():
        kind = matrix_kind(name, file_format, 0, config.num_layers)
        parts.append((name, rows.numpy(), 0, head if head and name == "output" else kind))
    for number in range(config.num_layers):
        for name, rows in layer.items():
            role, kind = name.removesuffix(".weight"), _Kind.F32
            if rows.ndim > 1 and not name.endswith(".bias") and "gate_inp" not in name:
                kind = matrix_kind(role, file_format, number, config.num_layers)
            parts.append((f"blk.{number}.{role}", rows, number, kind))
    parts.append(("output_norm", np.ones(config.hidden_size, np.float32), 0, _Kind.F32))
    sizes, blocks = list[int](), dict[tuple[int, _Kind], np.ndarray]()
    for name, rows, _, kind in parts:
        items, size = GGML_QUANT_SIZES[kind]
        sizes.append(rows.size // items * size)
        full = name if name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor_info(full, rows.shape, np.dtype(np.float32), sizes[-1], kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        file = writer.fout[0]
        for (name, rows, number, kind), size in zip(parts, sizes, strict=True):
            if (id(rows), kind) not in blocks:
                blocks[id(rows), kind] = rows if kind == _Kind.F32 else blocks_of(rows, kind)
            writer.write_padding(file, file.tell())
            # Other rows first in each layer, so that what layers add has nothing in common.
            axes = range(max(1, rows.ndim - (not name.endswith(".bias"))))
            np.roll(blocks[id(rows), kind], [61 * number] * len(axes), tuple(axes)).tofile(file)
            writer.write_padding(file, size)
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
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
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
    write(out, shape, file_format, _Kind.Q4_0 if file_format == "q4_0" else None)


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
