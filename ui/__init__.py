"""The HTTP server: its API, the chat page with the neuron map, what commands ask a system."""
