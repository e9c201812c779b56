"""What GGUF files say of a model: the table of architectures, and config.json made of metadata."""
