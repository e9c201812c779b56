"""What a running system shows of itself, none of it computed in the engine's thread."""
