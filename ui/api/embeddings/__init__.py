"""One vector for each text: /v1/embeddings, and what other ways to ask for one share."""
