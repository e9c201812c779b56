"""The embedded default model: weights, tokenizer, chat template, profile and plan, as data."""
