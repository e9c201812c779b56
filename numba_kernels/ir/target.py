"""What vector code is written for: lanes of a vector, lines and pages of memory, a CPU."""

from numba.core.registry import cpu_target

LANES = 16  # LLVM splits or joins them for what the CPU has
PAGE_BYTES = 4096
LINE_BYTES = 64
LINES_AHEAD = 4  # the first lines of a page wake the TLB and the hardware's stream prefetcher


def has_feature(name: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, such as "avx512f".

    It is this machine's, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
    """
    features = cpu_target.target_context.codegen()._tm_features  # no public name for it
    return f"+{name}" in features.split(",")
