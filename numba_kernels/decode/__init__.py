"""Kernels of a decode step, a few tokens; their speed is limited by memory bandwidth."""
