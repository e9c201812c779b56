"""OpenAI's /v1/responses, by the same requests as chat completions."""
