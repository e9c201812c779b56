"""OpenAI's newer way to ask: /v1/responses, over the same answers as chat completions."""
