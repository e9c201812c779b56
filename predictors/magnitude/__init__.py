"""Thresholds for activations that are never exactly zero: below them neurons are left out."""
