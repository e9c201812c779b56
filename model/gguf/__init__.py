"""The GGUF format: headers read within bounds, tensors as views of mapped files."""
