"""The attention service on a GPU: memory, copies, graphs and launches."""
