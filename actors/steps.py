"""How a prompt is cut into steps: kernels take few tokens, matrix products many."""

KERNEL_TOKENS = 8  # the most tokens that a service gives to its kernels at once
MATRIX_TOKENS = 20  # from here on matrix products are faster than several steps of kernels


def step_sizes(num_tokens: int, max_tokens: int) -> list[int]:
    """Sizes of the steps for a prompt, each at most `max_tokens`.

    The crossover of 20 was measured on the 8-layer llama-7b shape, f16 (docs/lab_log.md).
    """
    sizes = []
    while num_tokens > 0:
        most = max_tokens if num_tokens >= MATRIX_TOKENS else min(KERNEL_TOKENS, max_tokens)
        sizes.append(min(num_tokens, most))
        num_tokens -= sizes[-1]
    return sizes
