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


def has_vnni() -> bool:
    """Whether there are products of 64 unsigned with 64 signed bytes, four added up at once."""
    return has_feature("avx512vnni") and has_feature("avx512f")


# An Intel server's own prefetcher keeps too few lines under way for a core that computes meanwhile.
# AMD's, which alone have SSE4A, want less for quantized rows, none for floats: docs/lab_log.md.
_IS_FAR = has_feature("avx512f") and not has_feature("sse4a")
# Bytes between what is read of rows in sequence and what the second-level cache is asked for.
FLOATS_AHEAD = 4096 if _IS_FAR else 0
QUANTIZED_AHEAD = 4096 if _IS_FAR else 1024
