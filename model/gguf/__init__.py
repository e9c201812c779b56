"""GGUF files: headers read within bounds, tensors as views of the mapped bytes."""
