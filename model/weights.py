"""Weights in the layout that kernels read: one array a matrix kind, stacked over all layers.

Matrices stay bits of their checkpoint's format (float32, uint16 for float16, int16 for bfloat16),
or are quantized while they are read (`dtype` "q8" or "q4"): rows of Q8 or Q4, of which the shapes
count the weights. Norms and biases become float32, token embeddings stay as stored. An absent part
is an array with a 0 in its shape.

In the shapes: L layers, d hidden size, E embedding size, V vocabulary, P positions, H heads,
KV key-value heads, hd head size, N loaded neurons.
"""

from model.weight_formats import row_bytes
from model.weights_attention import AttentionWeights, load_attention
from model.weights_check import check_tensors, stored_config
from model.weights_embedding import EmbeddingWeights, HeadWeights, load_embedding, load_head
from model.weights_ffn import FfnWeights, load_ffn, load_gate
from model.weights_sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes

__all__ = [
    "AttentionWeights",
    "EmbeddingWeights",
    "FfnWeights",
    "HeadWeights",
    "attention_bytes",
    "check_tensors",
    "ffn_bytes",
    "head_bytes",
    "kv_cache_bytes",
    "load_attention",
    "load_embedding",
    "load_ffn",
    "load_gate",
    "load_head",
    "row_bytes",
    "stored_config",
]
