"""Benchmarks say where kernels are compiled for less than the CPU has."""

import pytest

from benchmarks.runs import forced_target

ZEN4 = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16")
ALDER_LAKE = ("avx2", "fma", "f16c", "avx_vnni")


@pytest.mark.parametrize(
    ("features", "compiled", "said"),
    [
        (ZEN4, {"avx2", "avx512f", "avx512vnni", "avx512bf16"}, ""),
        (ZEN4, {"avx2", "avx512f", "avx512vnni"}, "as AVX-512 VNNI"),
        (ZEN4, {"avx2", "avx512f"}, "as AVX-512"),
        (ZEN4, {"avx2"}, "as AVX2"),
        (ZEN4, set(), "as plain vectors"),
        (ALDER_LAKE, {"avx2", "avxvnni"}, ""),
        (ALDER_LAKE, {"avx2"}, "as AVX2"),
        ((*ZEN4, "avx_vnni"), {"avx2", "avxvnni"}, "as AVX-VNNI"),
        (("avx2", "fma", "f16c"), {"avx2"}, ""),
        ((), set(), ""),  # no /proc/cpuinfo
    ],
)
def test_what_was_forced(features: tuple[str, ...], compiled: set[str], said: str) -> None:
    assert forced_target(features, compiled.__contains__) == said
