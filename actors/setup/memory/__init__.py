"""What a system takes of memory, and which of its neurons stay there."""
