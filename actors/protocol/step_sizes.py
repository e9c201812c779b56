"""How a prompt is cut into steps: kernels take few tokens, matrix products many."""

# The most tokens that a service gives to its kernels at once; wishes are 32-bit masks of tokens.
KERNEL_TOKENS = 32
# So many tokens of one prompt or more go through matrix products. A service tells the two ways
# apart by the number of tokens alone.
MATRIX_TOKENS = KERNEL_TOKENS + 1


def chunk_sizes(num_tokens: int, max_tokens: int) -> list[int]:
    """Sizes of a prompt's chunks for matrix products, each at most `max_tokens`.

    What they leave, fewer than MATRIX_TOKENS unless `max_tokens` is too, goes through kernels. The
    cuts depend on these two numbers alone, because the two ways round differently.
    """
    sizes: list[int] = []
    while max_tokens >= MATRIX_TOKENS and num_tokens >= MATRIX_TOKENS:
        sizes.append(min(num_tokens, max_tokens))
        num_tokens -= sizes[-1]
    return sizes
