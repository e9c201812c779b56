"""What a request has of text: prompts, stop strings, grammars, logprobs of tokens."""
