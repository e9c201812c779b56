"""A GGUF file of a Qwen3 of a known shape with random weights, in the formats of a Q4_K_M file.

    python -m benchmarks.random_gguf OUT.gguf --shape qwen3-8b --layers 8

llama.cpp's quantizer gives Q4_K_M files Q6_K for the head, and for half of the layers' values and
down projections; all else is Q4_K. Numbers are drawn as blocks, not quantized: their spread is that
of a new model's weights, and what they are does not matter for speed.
"""

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

from hotcold.model.synthetic.shape import SHAPES as KNOWN
from hotcold.model.synthetic.shape import SyntheticShape

_SEED, _SPREAD = 2026, 0.02
_RANDOM_ROWS = 512  # drawn; repeated for larger matrices
_Q4, _Q6 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
_Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType | None]


SHAPES = {
    "qwen3-8b": KNOWN["qwen3-8b"],
    "tiny": SyntheticShape("qwen3", 256, 512, 2, 1, 128, 512, 256, 8, activation="silu"),
}
_ROPE_THETA, _NORM_EPS = 1e6, 1e-6


def takes_more_bits(layer: int, num_layers: int) -> bool:
    """Whether llama.cpp gives a layer's values and down more bits in Q4_K_M.

    Source:  llama.cpp, src/llama-quant.cpp, use_more_bits
    """
    eighth = num_layers // 8
    middle = eighth <= layer < 7 * num_layers // 8
    return not middle or (layer - eighth) % 3 == 2


def tensors(shape: SyntheticShape, layers: int) -> Iterator[_Tensor]:
    """Name, shape and type of all tensors; None for float32 norms."""
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd", (shape.vocab, hidden), _Q4
    for layer in range(layers):
        more = _Q6 if takes_more_bits(layer, layers) else _Q4
        block = f"blk.{layer}."
        yield f"{block}attn_norm", (hidden,), None
        yield f"{block}attn_q", (queries, hidden), _Q4
        yield f"{block}attn_k", (keys, hidden), _Q4
        yield f"{block}attn_v", (keys, hidden), more
        yield f"{block}attn_q_norm", (shape.head_dim,), None
        yield f"{block}attn_k_norm", (shape.head_dim,), None
        yield f"{block}attn_output", (hidden, queries), _Q4
        yield f"{block}ffn_norm", (hidden,), None
        yield f"{block}ffn_gate", (ffn, hidden), _Q4
        yield f"{block}ffn_up", (ffn, hidden), _Q4
        yield f"{block}ffn_down", (hidden, ffn), more
    yield "output_norm", (hidden,), None
    yield "output", (shape.vocab, hidden), _Q6


def random_blocks(
    rows: int, width: int, kind: GGMLQuantizationType, rng: np.random.Generator
) -> np.ndarray:
    """Rows of blocks (rows, bytes) uint8 whose weights are spread evenly around zero.

    Q4_K: d, dmin (float16), 12 bytes of eight scales and minima, all 32 here, 128 bytes of nibbles;
    Q6_K: 128 bytes of low nibbles, 64 of high bits, 16 scales, all 16 here, d.
    """
    items, size = GGML_QUANT_SIZES[kind]
    drawn = rng.integers(0, 256, (min(rows, _RANDOM_ROWS), width // items, size), np.uint8)
    if kind == _Q4:
        unit = _SPREAD / (np.sqrt((16**2 - 1) / 12) * 32)
        drawn[..., :4] = np.array([unit, 7.5 * unit], np.float16).view(np.uint8)
        drawn[..., 4:16] = [160] * 8 + [0] * 4  # 32 in six bits, eight times twice
    else:
        unit = _SPREAD / (np.sqrt((64**2 - 1) / 12) * 16)
        drawn[..., 192:208] = 16
        drawn[..., 208:] = np.array([unit], np.float16).view(np.uint8)
    return np.resize(drawn.reshape(len(drawn), -1), (rows, width // items * size))


def write(out: Path, shape: SyntheticShape, layers: int) -> None:
    """Write the file, whole or not at all; no more than one matrix is held at a time."""
    part = out.with_name(f"{out.name}.part")
    writer = GGUFWriter(str(part), shape.family)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(_NORM_EPS)
    writer.add_rope_freq_base(_ROPE_THETA)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_tokenizer_model("no_vocab")
    for name, sizes, kind in tensors(shape, layers):
        of = GGMLQuantizationType.F32 if kind is None else kind
        items, size = GGML_QUANT_SIZES[of]
        num_bytes = int(np.prod(sizes)) // items * size
        writer.add_tensor_info(f"{name}.weight", sizes, np.dtype(np.float32), num_bytes, of)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(_SEED)
        for _, sizes, kind in tensors(shape, layers):
            if kind is None:
                writer.write_tensor_data(np.ones(sizes, np.float32))
            else:
                writer.write_tensor_data(random_blocks(sizes[0], sizes[1], kind, rng))
        writer.close()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-8b", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
def main(out: Path, shape: str, layers: int) -> None:
    """Write OUT."""
    write(out, SHAPES[shape], layers)
    click.echo(f"{out}: {out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
