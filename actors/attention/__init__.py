"""The attention service: attention, KV cache, norms, head and hot neurons, on CPU or GPU."""
