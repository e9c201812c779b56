"""The KV cache: its pages allocated and evicted, found by key, written to disk and read."""
