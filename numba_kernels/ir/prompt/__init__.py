"""Vector code of prompts: products of rows and many tokens in pairs of 16-bit numbers."""
