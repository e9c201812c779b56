"""How a prompt is cut into steps: kernels take few tokens, matmul many."""

from typing import NamedTuple

# The most tokens that kernels take at once: which tokens want a neuron is a 32-bit mask.
KERNEL_TOKENS = 32
# A step of at least so many tokens, all of one prompt, goes through matmul. A service decides by
# the number of tokens alone.
MATRIX_TOKENS = KERNEL_TOKENS + 1


class MatmulChoice(NamedTuple):
    """Which matmul long prompts use.

    bfloat16: 16-bit weights multiply in bfloat16, else in float32
    own_bfloat16: they do so by this project's kernels, else by torch's
    integers: quantized weights multiply as integers, else as `bfloat16` says
    words: where not in bfloat16, 16-bit weights times vectors multiply as int16 with scales
    """

    bfloat16: bool
    integers: bool
    own_bfloat16: bool = False
    words: bool = False


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
