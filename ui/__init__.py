"""Faces: chat page, neuron map, HTTP API."""
