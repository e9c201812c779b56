"""A Llama checkpoint as a GGUF file of the same weights, for llama.cpp to read."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import UsageError

_F16_FILE_TYPE = 1


def write_gguf(path: Path, out: Path) -> None:
    """Write `path` (a Hugging Face Llama directory in float16) as `out`, without a vocabulary.

    llama.cpp computes this architecture with silu whatever the checkpoint says; the work is the
    same, the tokens are not.
    Errors:  UsageError for another family or format
    """
    config, checkpoint = ModelConfig.from_directory(path), Checkpoint(path)
    if config.family != "llama" or config.dtype != "float16":
        raise UsageError(f"{path.name} is {config.family} {config.dtype}; give a Llama in float16")
    writer = GGUFWriter(str(out), "llama")
    _write_sizes(writer, config)
    head = "lm_head.weight" if checkpoint.has("lm_head.weight") else "embed_tokens.weight"
    writer.add_tensor("token_embd.weight", _half(checkpoint, "embed_tokens.weight"))
    writer.add_tensor("output.weight", _half(checkpoint, head))
    writer.add_tensor("output_norm.weight", _vector(checkpoint, "norm.weight"))
    for layer in range(config.num_layers):
        _write_layer(writer, checkpoint, config, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(_F16_FILE_TYPE)
    writer.add_tokenizer_model("no_vocab")


def _write_layer(
    writer: GGUFWriter, checkpoint: Checkpoint, config: ModelConfig, layer: int
) -> None:
    ours, theirs = f"layers.{layer}.", f"blk.{layer}."
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        weight = _half(checkpoint, f"{ours}self_attn.{name}_proj.weight")
        halves = weight.reshape(heads, 2, config.head_dim // 2, config.hidden_size)
        paired = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        writer.add_tensor(f"{theirs}attn_{name}.weight", paired)
    matrices = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, target in matrices.items():
        writer.add_tensor(f"{theirs}{target}.weight", _half(checkpoint, f"{ours}{name}.weight"))
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, target in norms.items():
        writer.add_tensor(f"{theirs}{target}.weight", _vector(checkpoint, f"{ours}{name}.weight"))


def _half(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.array(name).view(np.float16)


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return _half(checkpoint, name).astype(np.float32)
