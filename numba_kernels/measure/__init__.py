"""Loops that time the kernels, the memory and the exchange; compiled with them."""
