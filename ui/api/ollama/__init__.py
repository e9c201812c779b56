"""Ollama's API, by the same requests as OpenAI's."""
