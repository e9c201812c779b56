"""The systems of one `hotcold serve`: what they need, their start, their end."""
