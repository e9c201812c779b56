"""A checkpoint as a GGUF file for llama.cpp: the same weights, or as many bytes in every part.

    python -m benchmarks.llama_gguf MODEL OUT.gguf --dtype q8

MODEL is a Hugging Face directory in float16. What becomes of it depends on its family:

- Llama: the same weights. llama.cpp computes silu whatever the checkpoint's activation is.
- Falcon: the same weights, in llama.cpp's own Falcon, which computes gelu.
- OPT, which llama.cpp does not know, and any model with biases: random weights in a Llama of the
  same attention and head. For an FFN of two matrices its three have 2/3 of the neurons, to the
  nearest multiple of 32, and so the same bytes.

The work is that of MODEL; the tokens are not. With q8 and q4 all projections, the FFN and the head
are ggml's Q8_0 and Q4_0: the very values and scales that hotcold makes of them, in ggml's order.
Only `down` differs in one thing: hotcold stores it by neurons and ggml by outputs, so their groups
of 32 lie across each other; rule and bytes are the same. Embeddings, of which a token reads a row,
stay float16.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize

from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.gguf_architectures import LLAMA_LAYER, LLAMA_NAMES
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.embedding import head_name
from hotcold.numba_kernels.formats import QUANT_GROUP

# hotcold's names of formats, with ggml's types of a tensor and of a file.
DTYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
_QUANTIZED = ("q8", "q4")
_RANDOM_ITEMS = 1 << 22
_SEED = 2026


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to write: a matrix (rows, width) in float16, or a float32 vector."""

    name: str
    values: np.ndarray
    dtype: str  # of DTYPES, or f32

    @property
    def kind(self) -> GGMLQuantizationType:
        """ggml's type of it."""
        return GGMLQuantizationType.F32 if self.dtype == "f32" else DTYPES[self.dtype][0]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        block_items, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.values.size // block_items * block_bytes

    def data(self) -> np.ndarray:
        """Its bytes in ggml's order."""
        return quantize(self.values.astype(np.float32), self.kind)


def matrix(name: str, rows: np.ndarray, dtype: str) -> GgufTensor:
    """A matrix in a format of DTYPES. Errors: UsageError for rows of no whole groups of 32."""
    if dtype in _QUANTIZED and rows.shape[1] % QUANT_GROUP:
        raise UsageError(
            f"{name} has rows of {rows.shape[1]} weights, no multiple of {QUANT_GROUP}; compare "
            "this model in f16"
        )
    return GgufTensor(name, rows, dtype)


def vector(name: str, values: np.ndarray) -> GgufTensor:
    """A norm's weights or biases, which llama.cpp keeps in float32."""
    return GgufTensor(name, values.astype(np.float32), "f32")


def write_tensors(
    out: Path,
    arch: str,
    keys: Mapping[str, int | float],
    dtype: str,
    tensors: Callable[[], Iterator[GgufTensor]],
) -> None:
    """Write a GGUF file without a vocabulary, whole or not at all.

    `tensors` is asked twice, for the header and then for the weights, so that no more than one
    tensor is held at a time. `keys` stand under `arch`.
    """
    part = out.with_name(f"{out.name}.part")
    writer = GGUFWriter(str(part), arch)
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_file_type(DTYPES[dtype][1])
    writer.add_tokenizer_model("no_vocab")
    for each in tensors():
        writer.add_tensor_info(
            each.name, each.values.shape, each.values.dtype, each.num_bytes, raw_dtype=each.kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in tensors():
            writer.write_tensor_data(each.data())
        writer.close()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def write_gguf(path: Path, out: Path, dtype: str = "f16") -> None:
    """Write `path`, a Hugging Face directory in float16, as `out`.

    Memory:  one matrix at a time; `out` appears when it is complete
    Errors:  UsageError for another format, or rows that have no whole groups of 32
    """
    config, checkpoint = read_config(path), Checkpoint(path)
    if config.experts is not None:
        raise UsageError(
            f"{path.name} is a mixture of experts; benchmarks.random_gguf writes one of its shape, "
            "which both programs read"
        )
    if config.dtype != "float16":
        raise UsageError(f"{path.name} is in {config.dtype}; give a model in float16")
    if dtype not in DTYPES:
        raise UsageError(f"no format {dtype!r} to write; give {', '.join(DTYPES)}")
    arch = same_arch(config)
    if arch:
        keys = _keys(config, "rms_epsilon" if arch == "llama" else "epsilon")
        write_tensors(out, arch, keys, dtype, lambda: _same_weights(checkpoint, config, dtype))
    else:
        keys = _keys(config, "rms_epsilon") | {"feed_forward_length": equal_ffn_size(config)}
        write_tensors(out, "llama", keys, dtype, lambda: _random_llama(config, dtype))


def likeness(config: ModelConfig) -> str:
    """What llama.cpp reads for such a model."""
    arch = same_arch(config)
    if arch:
        activation = "silu" if arch == "llama" else "gelu"
        return f"the same weights as a {arch.capitalize()}, with {activation} for activation"
    if config.has_gate:
        return "a Llama of the same sizes, with random weights"
    return (
        f"a Llama of equal bytes, with random weights: {equal_ffn_size(config)} neurons of three "
        f"matrices for {config.ffn_size} of two"
    )


def same_arch(config: ModelConfig) -> str:
    """llama.cpp's architecture that has exactly this model's tensors, or "" where none has."""
    if config.attention_bias or config.ffn_bias:
        return ""
    if config.family == "llama":
        return "llama"
    rotates = config.rope is not None
    return "falcon" if config.family == "falcon" and config.parallel_ffn and rotates else ""


def equal_ffn_size(config: ModelConfig) -> int:
    """Neurons of a gated FFN with the bytes of this model's, a multiple of 32 like any row."""
    if config.has_gate:
        return config.ffn_size
    return max(QUANT_GROUP, round(config.ffn_size * 2 / 3 / QUANT_GROUP) * QUANT_GROUP)


def _keys(config: ModelConfig, epsilon: str) -> dict[str, int | float]:
    """llama.cpp's names of a model's sizes."""
    return {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm_{epsilon}": config.norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope.theta if config.rope else 10000.0,
        "vocab_size": config.vocab_size,
    }


def gguf_names(config: ModelConfig) -> TensorNames:
    """llama.cpp's names of what `tensor_names` calls a model's tensors."""
    if config.family == "llama":
        return LLAMA_NAMES
    norm, ffn_norm = ("attn_norm_2", "attn_norm") if config.has_ffn_norm else ("attn_norm", "")
    falcon = replace(
        LLAMA_LAYER, norm=norm, qkv=("attn_qkv",), ffn_norm=ffn_norm, gate="ffn_up", up=""
    )
    return replace(LLAMA_NAMES, layer=falcon)


def _same_weights(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> Iterator[GgufTensor]:
    ours, theirs = tensor_names(config), gguf_names(config)
    yield matrix(f"{theirs.tokens}.weight", _half(checkpoint, f"{ours.tokens}.weight"), "f16")
    yield matrix(f"{theirs.head}.weight", _half(checkpoint, head_name(checkpoint, config)), dtype)
    yield from _norm(checkpoint, config, ours.final_norm, theirs.final_norm)
    for layer in range(config.num_layers):
        names, targets = ours.of_layer(layer), theirs.of_layer(layer)
        for number, (name, target) in enumerate(zip(names.qkv, targets.qkv, strict=True)):
            rows = _half(checkpoint, f"{name}.weight")
            if config.fused_qkv:
                rows = _unfused(rows, config)
            elif number < 2:
                rows = _paired(rows, (config.num_heads, config.num_kv_heads)[number])
            yield matrix(f"{target}.weight", rows, dtype)
        for part in ("out", "gate", "up", "down"):
            name, target = getattr(names, part), getattr(targets, part)
            if name:
                yield matrix(f"{target}.weight", _half(checkpoint, f"{name}.weight"), dtype)
        yield from _norm(checkpoint, config, names.norm, targets.norm)
        if names.ffn_norm:
            yield from _norm(checkpoint, config, names.ffn_norm, targets.ffn_norm)


def _random_llama(config: ModelConfig, dtype: str) -> Iterator[GgufTensor]:
    """Random weights, the same ones again and again: what they are does not matter for speed."""
    noise = np.random.default_rng(_SEED).standard_normal(_RANDOM_ITEMS, dtype=np.float32)
    some = (noise * 0.02).astype(np.float16)
    hidden, attention = config.hidden_size, config.attention_size
    keys = config.num_kv_heads * config.head_dim
    ffn_size, ones = equal_ffn_size(config), np.ones(hidden, np.float16)

    def rows(height: int, width: int) -> np.ndarray:
        return np.resize(some, (height, width))

    yield matrix(f"{LLAMA_NAMES.tokens}.weight", rows(config.vocab_size, hidden), "f16")
    yield matrix(f"{LLAMA_NAMES.head}.weight", rows(config.vocab_size, hidden), dtype)
    yield vector(f"{LLAMA_NAMES.final_norm}.weight", ones)
    shapes = [(attention, hidden), (keys, hidden), (keys, hidden), (hidden, attention)]
    shapes += [(ffn_size, hidden), (ffn_size, hidden), (hidden, ffn_size)]
    for layer in range(config.num_layers):
        names = LLAMA_NAMES.of_layer(layer)
        matrices = (*names.qkv, names.out, names.gate, names.up, names.down)
        for name, shape in zip(matrices, shapes, strict=True):
            yield matrix(f"{name}.weight", rows(*shape), dtype)
        yield vector(f"{names.norm}.weight", ones)
        yield vector(f"{names.ffn_norm}.weight", ones)


def _norm(
    checkpoint: Checkpoint, config: ModelConfig, name: str, target: str
) -> Iterator[GgufTensor]:
    for part in ("weight", "bias") if config.norm_bias else ("weight",):
        yield vector(f"{target}.{part}", _half(checkpoint, f"{name}.{part}"))


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, the two that rotate together side by side, as llama.cpp's Llama has them."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _unfused(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Falcon's rows, which go by KV heads, as all queries, all keys, all values."""
    groups = rows.reshape(config.num_kv_heads, -1, config.head_dim, rows.shape[1])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, rows.shape[1]) for part in parts])


def _half(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.array(name).view(np.float16)


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="f16", show_default=True)
def main(model: Path, out: Path, dtype: str) -> None:
    """Write MODEL as the GGUF file OUT."""
    try:
        write_gguf(model, out, dtype)
        click.echo(f"{out}: {likeness(read_config(model))}")
    except HotcoldError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
