"""Ollama's API, over the same answers as OpenAI's."""
