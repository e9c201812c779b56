"""Weights in the layout that kernels read: one array a matrix kind, stacked over all layers.

Matrices stay bits of their checkpoint's format (float32, uint16 for float16, int16 for bfloat16),
or are quantized while they are read (`dtype` "q8", "q4_1" or "q4"); shapes of quantized rows count
weights. Norms and biases become float32, token embeddings stay as stored. An absent part is an
array with a 0 in its shape.

In the shapes: L layers, d hidden size, E embedding size, V vocabulary, P positions, H heads,
KV key-value heads, hd head size, N loaded neurons.
"""
