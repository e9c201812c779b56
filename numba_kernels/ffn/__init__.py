"""A layer's feed-forward network by the threads of a service: one flow, over sources of rows."""
