"""A prompt's many tokens: matmul kernels, and up and down of the neurons that fire."""
