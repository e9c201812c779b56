"""A checkpoint on disk: its configuration, weights, tokenizer, sampling and dense reference."""
