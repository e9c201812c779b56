"""What vector code is written for: lanes of a vector, lines and pages of memory, a CPU."""

from numba.core.registry import cpu_target

from hotcold.numba_kernels.amx import may_use_amx

LANES = 16  # LLVM splits or joins them for what the CPU has
PAGE_BYTES = 4096
LINE_BYTES = 64
LINES_AHEAD = 4  # the first lines of a page wake the TLB and the hardware's stream prefetcher


def has_feature(name: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, such as "avx512f".

    It is this machine's, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say. AMX counts only where
    it works and the operating system lets this process use it: many virtual machines and sandboxes
    do not.
    """
    features = cpu_target.target_context.codegen()._tm_features  # no public name for it
    has_it = f"+{name}" in features.split(",")
    return has_it and may_use_amx() if name.startswith("amx") else has_it


# Lanes of a register.
REGISTER_LANES = LANES if has_feature("avx512f") else LANES // 2
# Unsigned bytes times signed ones, four products a lane added up: by how many lanes of 32 bits.
_VNNI = (
    (LANES, ("avx512vnni", "avx512f")),
    (LANES // 2, ("avxvnni",)),  # the VEX form of CPUs without AVX-512
    (LANES // 2, ("avx512vnni", "avx512vl")),
)


def vnni_lanes() -> int:
    """Lanes of the widest VNNI instruction that the CPU has; 0 without VNNI."""
    return next((lanes for lanes, needed in _VNNI if all(map(has_feature, needed))), 0)


def has_vnni() -> bool:
    """Whether there are products of unsigned with signed bytes, four added up at once."""
    return vnni_lanes() > 0


# A prefetcher of the hardware keeps too few lines under way for a core that computes meanwhile:
# an Intel server's for all rows, AMD's, which alone have SSE4A, for quantized ones
# (docs/decisions.md); other CPUs were not measured.
_IS_AMD = has_feature("sse4a")
_IS_FAR = has_feature("avx512f") and not _IS_AMD
# Bytes between what is read of rows in sequence and what the second-level cache is asked for.
FLOATS_AHEAD = 4096 if _IS_FAR else 0
QUANTIZED_AHEAD = 16384 if _IS_AMD else 4096 if _IS_FAR else 1024
