"""A GGUF file of the shape of a mixture of this year, with random weights.

    python -m benchmarks.random_hybrids OUT.gguf --shape qwen3.6-35b-a3b --layers 8

Matrices are in Q4_0 (down projections of Gemma 4 have no whole blocks of 256), the head is in Q6_K.
A few rows are drawn for each width, and all matrices have these in other orders: experts are chosen
evenly, and for speed the numbers do not matter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

from benchmarks.random_gguf import blocks_of

_DRAWN_ROWS = 1024
_Shape = tuple[int, ...]
_Tensors = Iterator[tuple[str, _Shape, float]]  # name, shape, and the mean of numbers in F32


def _experts(width: int, experts: int, neurons: int) -> _Tensors:
    yield "ffn_gate_inp.weight", (experts, width), 0
    yield "ffn_gate_up_exps.weight", (experts, 2 * neurons, width), 0
    yield "ffn_down_exps.weight", (experts, width, neurons), 0


def _norms(width: int, *names: str) -> _Tensors:
    yield from ((f"{name}.weight", (width,), 1) for name in names)


def _qwen_layer(layer: int) -> _Tensors:
    width, heads = 2048, 4096
    yield from _norms(width, "attn_norm", "post_attention_norm")
    if layer % 4 == 3:
        yield "attn_q.weight", (2 * heads, width), 0
        yield "attn_k.weight", (512, width), 0
        yield "attn_v.weight", (512, width), 0
        yield from _norms(256, "attn_q_norm", "attn_k_norm")
        yield "attn_output.weight", (width, heads), 0
    else:
        yield "attn_qkv.weight", (2 * heads, width), 0
        yield "attn_gate.weight", (heads, width), 0
        yield "ssm_conv1d.weight", (2 * heads, 4), 0.25
        yield "ssm_dt.bias", (32,), 0
        yield "ssm_a", (32,), -0.1
        yield "ssm_alpha.weight", (32, width), 0
        yield "ssm_beta.weight", (32, width), 0
        yield from _norms(128, "ssm_norm")
        yield "ssm_out.weight", (width, heads), 0
    yield from _experts(width, 256, 512)
    yield "ffn_gate_inp_shexp.weight", (width,), 0
    for role, shape in (("gate", (512, width)), ("up", (512, width)), ("down", (width, 512))):
        yield f"ffn_{role}_shexp.weight", shape, 0


def _gemma_layer(layer: int) -> _Tensors:
    width, is_full = 2816, layer % 6 == 5
    dim, kv_heads = (512, 2) if is_full else (256, 8)
    yield "attn_q.weight", (16 * dim, width), 0
    yield "attn_k.weight", (kv_heads * dim, width), 0
    if not is_full:
        yield "attn_v.weight", (kv_heads * dim, width), 0
    yield "attn_output.weight", (width, 16 * dim), 0
    yield from _norms(dim, "attn_q_norm", "attn_k_norm")
    norms = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
    yield from _norms(width, *norms, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    yield "layer_output_scale.weight", (1,), 1
    for role, shape in (("gate", (2112, width)), ("up", (2112, width)), ("down", (width, 2112))):
        yield f"ffn_{role}.weight", shape, 0
    yield from _experts(width, 128, 704)
    yield "ffn_gate_inp.scale", (width,), 1
    yield "ffn_down_exps.scale", (128,), 1


def _qwen_keys(layers: int) -> dict[str, Any]:
    return {
        "embedding_length": 2048, "feed_forward_length": 512, "context_length": 262_144,
        "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256,
        "attention.value_length": 256, "rope.dimension_count": 64, "rope.freq_base": 1e7,
        "rope.dimension_sections": [11, 11, 10, 0], "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 512,
        "expert_shared_feed_forward_length": 512, "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128,
        "ssm.time_step_rank": 32, "ssm.group_count": 16,
    }  # fmt: skip


def _gemma_keys(layers: int) -> dict[str, Any]:
    is_full = [layer % 6 == 5 for layer in range(layers)]
    return {
        "embedding_length": 2816, "feed_forward_length": [2112] * layers,
        "context_length": 262_144, "attention.head_count": 16,
        "attention.head_count_kv": [2 if full else 8 for full in is_full],
        "attention.key_length": 512, "attention.value_length": 512,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "attention.sliding_window": 1024, "attention.sliding_window_pattern":
        [not full for full in is_full], "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0, "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "attention.layer_norm_rms_epsilon": 1e-6, "final_logit_softcapping": 30.0,
        "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 704,
    }  # fmt: skip


# By name: llama.cpp's architecture, keys, tensors of a layer, vocabulary, whether there is a head.
SHAPES = {
    "qwen3.6-35b-a3b": ("qwen35moe", _qwen_keys, _qwen_layer, 248_320, True),
    "gemma-4-26b-a4b": ("gemma4", _gemma_keys, _gemma_layer, 262_144, False),
}


class _Matrices:
    """Blocks of random matrices: the same few rows of a width, in an order of each one's own."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(2026)
        self._drawn: dict[tuple[int, GGMLQuantizationType], np.ndarray] = {}

    def blocks(self, shape: _Shape, kind: GGMLQuantizationType) -> np.ndarray:
        width, num_rows = shape[-1], int(np.prod(shape[:-1]))
        if (width, kind) not in self._drawn:
            rows = self._random.standard_normal((_DRAWN_ROWS, width), np.float32) / width**0.5
            self._drawn[width, kind] = blocks_of(rows, kind)
        drawn = np.roll(self._drawn[width, kind], int(self._random.integers(_DRAWN_ROWS)), axis=0)
        return np.resize(drawn, (num_rows, drawn.shape[1]))


def write(out: Path, name: str, layers: int) -> None:
    """Write the file."""
    arch, keys, layer_of, vocabulary, has_head = SHAPES[name]
    writer, matrices = GGUFWriter(str(out), arch), _Matrices()
    values = keys(layers) | {"block_count": layers, "vocab_size": vocabulary}
    for key, value in values.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add = writer.add_array if isinstance(value, list) else add
        add(f"{arch}.{key}", value)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("no_vocab")
    width = values["embedding_length"]
    tensors: list[tuple[str, _Shape, float]] = [("token_embd.weight", (vocabulary, width), 0)]
    tensors += [("output_norm.weight", (width,), 1)]
    tensors += [("output.weight", (vocabulary, width), 0)] * has_head
    if arch == "gemma4":
        tensors.append(("rope_freqs.weight", (256,), 1))
    for layer in range(layers):
        tensors += [(f"blk.{layer}.{part}", *rest) for part, *rest in layer_of(layer)]  # type: ignore[misc]
    whole = GGMLQuantizationType.Q6_K
    for tensor, shape, mean in tensors:
        is_end = tensor.startswith(("token_embd", "output.w"))
        kind = whole if is_end else GGMLQuantizationType.Q4_0
        if len(shape) == 1 or any(part in tensor for part in ("gate_inp.w", "conv1d")):
            noise = np.random.default_rng(1).standard_normal(shape, np.float32)
            size = 0.1 if mean else shape[-1] ** -0.5
            numbers = np.float32(mean) + noise * np.float32(size)
            if tensor == "rope_freqs.weight":
                numbers[:] = np.where(np.arange(shape[0]) < shape[0] // 4, 1, 1e30)
            if tensor.endswith("ssm_a"):
                numbers = -np.abs(numbers)
            writer.add_tensor(tensor, numbers)
            continue
        items, size_of = GGML_QUANT_SIZES[kind]
        blocks = matrices.blocks(shape, kind).reshape(*shape[:-1], -1)
        assert blocks.shape[-1] == shape[-1] // items * size_of
        writer.add_tensor(tensor, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--shape", "name", type=click.Choice([*SHAPES]), default="qwen3.6-35b-a3b")
@click.option("--layers", type=click.IntRange(min=1), default=8)
def main(out: Path, name: str, layers: int) -> None:
    """Write OUT."""
    write(out, name, layers)
    click.echo(f"{out}: {out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
