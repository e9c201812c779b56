"""The GPU service's work: attention, KV cache, norms, head and hot neurons."""
