"""Weights on their way into memory: copied, turned, quantized, converted."""
