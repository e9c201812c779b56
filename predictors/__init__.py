"""Which cold neurons will fire for a token, and how that is learned."""
