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

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmarks.gguf_tensors import DTYPES, GgufTensor, matrix, vector, write_tensors
from model.config.build import read_config
from model.config.model_config import ModelConfig
from model.errors import HotcoldError, UsageError
from model.files.checkpoint import Checkpoint
from numba_kernels.formats import GROUP

_RANDOM_ITEMS = 1 << 22
_SEED = 2026


def write_gguf(path: Path, out: Path, dtype: str = "f16") -> None:
    """Write `path`, a Hugging Face directory in float16, as `out`.

    Memory:  one matrix at a time; `out` appears when it is complete
    Errors:  UsageError for another format, or rows that have no whole groups of 32
    """
    config, checkpoint = read_config(path), Checkpoint(path)
    if config.dtype != "float16":
        raise UsageError(f"{path.name} is in {config.dtype}; give a model in float16")
    if dtype not in DTYPES:
        raise UsageError(f"no format {dtype!r} to write; give {', '.join(DTYPES)}")
    arch = same_arch(config)
    if arch == "llama":
        keys = _keys(config, "rms_epsilon")
        write_tensors(out, arch, keys, dtype, lambda: _llama(checkpoint, config, dtype))
    elif arch == "falcon":
        keys = _keys(config, "epsilon")
        write_tensors(out, arch, keys, dtype, lambda: _falcon(checkpoint, config, dtype))
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
    return max(GROUP, round(config.ffn_size * 2 / 3 / GROUP) * GROUP)


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


def _llama(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> Iterator[GgufTensor]:
    yield from _embedding_and_head(checkpoint, "embed_tokens.weight", dtype)
    yield vector("output_norm.weight", _half(checkpoint, "norm.weight"))
    matrices = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            rows = _paired(_half(checkpoint, f"{ours}self_attn.{name}_proj.weight"), heads)
            yield matrix(f"{theirs}attn_{name}.weight", rows, dtype)
        for name, target in matrices.items():
            rows = _half(checkpoint, f"{ours}{name}.weight")
            yield matrix(f"{theirs}{target}.weight", rows, dtype)
        for name, target in norms.items():
            yield vector(f"{theirs}{target}.weight", _half(checkpoint, f"{ours}{name}.weight"))


def _falcon(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> Iterator[GgufTensor]:
    yield from _embedding_and_head(checkpoint, "word_embeddings.weight", dtype)
    yield from _norm(checkpoint, "ln_f", "output_norm")
    norms = {"input_layernorm": "attn_norm"}
    if config.has_ffn_norm:
        norms = {"ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"}
    matrices = {
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    }
    for layer in range(config.num_layers):
        ours, theirs = f"h.{layer}.", f"blk.{layer}."
        fused = _half(checkpoint, f"{ours}self_attention.query_key_value.weight")
        yield matrix(f"{theirs}attn_qkv.weight", _unfused(fused, config), dtype)
        for name, target in matrices.items():
            rows = _half(checkpoint, f"{ours}{name}.weight")
            yield matrix(f"{theirs}{target}.weight", rows, dtype)
        for name, target in norms.items():
            yield from _norm(checkpoint, f"{ours}{name}", f"{theirs}{target}")


def _random_llama(config: ModelConfig, dtype: str) -> Iterator[GgufTensor]:
    """Random weights, the same ones again and again: what they are does not matter for speed."""
    noise = np.random.default_rng(_SEED).standard_normal(_RANDOM_ITEMS, dtype=np.float32)
    some = (noise * 0.02).astype(np.float16)
    hidden, attention = config.hidden_size, config.attention_size
    keys = config.num_kv_heads * config.head_dim
    ffn_size, ones = equal_ffn_size(config), np.ones(hidden, np.float16)

    def rows(height: int, width: int) -> np.ndarray:
        return np.resize(some, (height, width))

    yield matrix("token_embd.weight", rows(config.vocab_size, hidden), "f16")
    yield matrix("output.weight", rows(config.vocab_size, hidden), dtype)
    yield vector("output_norm.weight", ones)
    shapes = {
        "attn_q": (attention, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, attention),
        "ffn_gate": (ffn_size, hidden),
        "ffn_up": (ffn_size, hidden),
        "ffn_down": (hidden, ffn_size),
    }
    for layer in range(config.num_layers):
        for name, shape in shapes.items():
            yield matrix(f"blk.{layer}.{name}.weight", rows(*shape), dtype)
        yield vector(f"blk.{layer}.attn_norm.weight", ones)
        yield vector(f"blk.{layer}.ffn_norm.weight", ones)


def _embedding_and_head(checkpoint: Checkpoint, name: str, dtype: str) -> Iterator[GgufTensor]:
    head = "lm_head.weight" if checkpoint.has("lm_head.weight") else name
    yield matrix("token_embd.weight", _half(checkpoint, name), "f16")
    yield matrix("output.weight", _half(checkpoint, head), dtype)


def _norm(checkpoint: Checkpoint, name: str, target: str) -> Iterator[GgufTensor]:
    for part in ("weight", "bias"):
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
