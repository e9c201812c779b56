"""Weights on their way into memory: copies, checks, conversions, quantization."""
