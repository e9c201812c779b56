"""A checkpoint on disk: configuration, weights, tokenizer, chat template, sampling options."""
