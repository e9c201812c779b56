"""Layers that keep a state of the sequence: gated delta nets, by steps and prompts alike."""
