"""The HTTP API: OpenAI's routes and what is between them and a running system."""
