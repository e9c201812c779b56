"""The chat page: conversations, the live neuron map, the placement picture."""
