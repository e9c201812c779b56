"""How a prompt is cut into steps: kernels take few tokens, matmul many.

A token's bits depend on the tokens before it and on which of the two computes it. So which one does
depends on the prompt's length alone, and for all tokens but the last ones not even on that: what
two prompts begin with alike, both compute alike. Where chunks are cut is free on CPU services, at
multiples of `cut_tokens`; a GPU's matmul depends on its shapes, so there all chunks are cut at
multiples of `max_tokens` from the prompt's beginning.
"""

import math

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.decode.selection import MASK_TOKENS

# The most tokens that kernels take at once: which tokens want a neuron is a 32-bit mask.
KERNEL_TOKENS = MASK_TOKENS
# The most tokens whose next layer's experts are guessed: more of them use most of a layer.
MAX_GUESSED = 4
# A step of at least so many tokens, all of one prompt, goes through matmul. A service decides by
# the number of tokens alone.
MATRIX_TOKENS = KERNEL_TOKENS + 1


def cut_tokens(max_tokens: int, has_gpu: bool) -> int:
    """What all places where a prompt may be cut are multiples of.

    max_tokens: of a chunk at most
    """
    return max_tokens if has_gpu else min(max_tokens, PAGE_POSITIONS)


def share_tokens(cut: int) -> int:
    """What a beginning that prompts share is a multiple of, given `cut_tokens`; 0: nothing is.

    It ends where a page ends and where any prompt may be cut. Where kernels compute all, decoded
    tokens could be shared as well; no system but the smallest is like that, and none does.
    """
    return math.lcm(cut, PAGE_POSITIONS) if cut >= MATRIX_TOKENS else 0


def matrix_tokens(num_tokens: int, cut: int) -> int:
    """How many of a prompt's tokens, the first ones, go through matmul.

    All but those after the last multiple of `cut`, and these too unless kernels take them at once.
    """
    if cut < MATRIX_TOKENS:
        return 0
    rest = num_tokens % cut
    return num_tokens - (rest if rest < MATRIX_TOKENS else 0)


def chunk_sizes(num_tokens: int, max_tokens: int, cut: int, first: int = 0) -> list[int]:
    """Sizes of a prompt's chunks for matmul from token `first` on, a multiple of `cut`.

    Each is at least MATRIX_TOKENS and at most `max_tokens`, and all but the last are multiples of
    `cut`. The prompt's rest goes through kernels.
    """
    end, sizes = matrix_tokens(num_tokens, cut), list[int]()
    while first < end:
        sizes.append(min(end - first, max_tokens // cut * cut))
        first += sizes[-1]
    return sizes
