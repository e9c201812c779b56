"""The HTTP server: its API, the chat page with the neuron map, the local control API."""
