"""How a prompt is cut into steps: kernels take few tokens, matmul many."""

from hotcold.numba_kernels.decode.selection import MASK_TOKENS

# The most tokens that kernels take at once: which tokens want a neuron is a 32-bit mask.
KERNEL_TOKENS = MASK_TOKENS
# A step of at least so many tokens, all of one prompt, goes through matmul. A service decides by
# the number of tokens alone.
MATRIX_TOKENS = KERNEL_TOKENS + 1


def chunk_sizes(num_tokens: int, max_tokens: int) -> list[int]:
    """Sizes of a prompt's chunks for matmul, each at most `max_tokens`.

    The rest, fewer than MATRIX_TOKENS unless `max_tokens` is too, goes through kernels. The cuts
    depend on these two numbers alone, because matmul and kernels round differently.
    """
    sizes: list[int] = []
    while max_tokens >= MATRIX_TOKENS and num_tokens >= MATRIX_TOKENS:
        sizes.append(min(num_tokens, max_tokens))
        num_tokens -= sizes[-1]
    return sizes
