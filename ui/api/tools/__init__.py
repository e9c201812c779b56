"""Tools that answers may call, by OpenAI's names."""
