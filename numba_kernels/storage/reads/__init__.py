"""Spans of a file of neurons: asked for, read by threads or a ring, checked, copied."""
