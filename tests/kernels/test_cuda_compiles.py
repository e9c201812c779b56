"""Every CUDA source compiles for the oldest and the newest GPU, without a warning.

The sources look at no generation, and the oldest has the least memory for a block of threads. Each
template is compiled in few specialisations, which between them have every format, both ways to read
and every tile of tokens. HOTCOLD_ALL_KERNELS=1 compiles all of them for every generation, which
takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hotcold.cuda_kernels.source import CSRC, OPTIONS, Entry, plain_source
from tests.kernels.emulation.build import all_entries
from tests.kernels.nvrtc import Nvrtc, find_nvrtc

TARGETS = (75, 80, 86, 89, 90, 120)
FEW = {
    "gemv": [
        "F32_true_8",
        "BF16_true_2",
        "F16_false_8",
        "Q4_true_1",
        "Q4_1_true_2",
        "Q6_true_1",
        "Q4_K_true_1",
        "Q5_true_2",
        "Q5_K_false_1",
        "MXFP4_true_1",
    ],
    "gates": ["F16_true_4", "Q8_true_2", "Q4_false_1", "Q4_1_false_8"],
    "down": [
        "F32_true_2",
        "F16_true_8",
        "BF16_false_4",
        "Q8_true_1",
        "Q4_true_4",
        "Q8_false_4",
        "Q4_1_true_4",
        "MXFP4_true_1",
    ],
    "attention": ["F16_true_16_8", "F32_false_32_4", "F16_false_8_1", "merge_splits"],
    "widen": [
        "F32_true",
        "F16_false",
        "BF16_true",
        "Q8_true",
        "Q4_false",
        "Q4_1_true",
        "Q6_true",
        "Q4_K_true",
        "Q5_true",
        "Q5_K_false",
        "MXFP4_true",
    ],
}
_CUPY_OPTIONS = ["--device-as-default-execution-space"]  # which it always gives
IS_ALL = os.environ.get("HOTCOLD_ALL_KERNELS") == "1"
FILES = sorted(path.stem for path in CSRC.glob("*.cu"))


def chosen(file: str) -> list[Entry]:
    own = [entry for entry in all_entries() if entry.file == file]
    if IS_ALL or file not in FEW:
        return own
    return [entry for entry in own if entry.name.endswith(tuple(FEW[file]))]


def source_of(file: str) -> str:
    return "\n".join([plain_source(file), *(entry.line for entry in chosen(file)), ""])


def test_the_choice_has_every_template() -> None:
    assert {entry.file for entry in all_entries()} == set(FILES)
    for files in ({"gemv", "gates"}, {"down"}, {"attention"}, {"widen"}):
        found = {
            argument for file in files for entry in chosen(file) for argument in entry.arguments
        }
        everything = [entry for entry in all_entries() if entry.file in files]
        assert found == {argument for entry in everything for argument in entry.arguments}


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("file", FILES)
def test_nvcc(file: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    known = [target for target in TARGETS if f"sm_{target}" in listed.stdout.split()]
    assert known, f"{nvcc} knows none of {TARGETS}"
    source = tmp_path / f"{file}.cu"
    source.write_text(source_of(file))
    command = [nvcc, *OPTIONS, "-Werror", "all-warnings", "-fatbin", str(source), "-o"]
    command.append(str(tmp_path / "kernels.fatbin"))
    # The sources look at no target, so one PTX, of the oldest, stands for those of all.
    codes = ",".join(
        f"sm_{target}" for target in (known if IS_ALL else sorted({known[0], known[-1]}))
    )
    command.append(f"-gencode=arch=compute_{known[0]},code=[{codes}]")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if len(known) < len(TARGETS):
        unknown = sorted(set(TARGETS) - set(known))
        pytest.skip(f"compiled for {known}; this nvcc does not know {unknown}")


def test_nvrtc() -> None:
    """What CuPy compiles with; where nvcc is missing it stands in for it."""
    path = find_nvrtc()
    if path is None:
        pytest.skip("no NVRTC: pip install 'hotcold[cuda]'")
    compiler = Nvrtc(path)
    known = [target for target in TARGETS if target in compiler.targets()]
    assert known
    for file in FILES:
        for target in known if shutil.which("nvcc") is None else known[-1:]:
            options = [*OPTIONS, *_CUPY_OPTIONS, f"-arch=sm_{target}"]
            is_done, log = compiler.compile(source_of(file), options)
            assert is_done and not log, log
