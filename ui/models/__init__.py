"""Which models a server has, and which of them are loaded."""
