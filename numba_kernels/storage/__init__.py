"""Neurons that are read from a file when they are wanted: reads, slots in memory, the FFN."""
