"""A Ray of only what one process needs, and workers that are forked."""
