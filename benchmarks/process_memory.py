"""How much memory processes had resident, from /proc."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.runs import Json

PAGE_BYTES = 4096
_IS_THERE, _FRAME = np.uint64(1 << 63), np.uint64((1 << 55) - 1)  # of an entry of a page map


def high_water_bytes(process_id: int) -> int:
    """The most bytes that a process had resident, mapped files too; 0 where it has ended."""
    return kilobytes(process_id, "status", "VmHWM") * 1024


def memory_of(process_ids: Iterable[int]) -> Json:
    """Peak and present memory of processes together, what they share counted once.

    peak_bytes = sum of (high-water mark - what is shared with others now)
    Units:   bytes; a process's share of what it shares is its proportional set size (PSS)
    """
    peak_kb = now_kb = 0
    for process_id in process_ids:
        resident = kilobytes(process_id, "smaps_rollup", "Rss")
        fair_share = kilobytes(process_id, "smaps_rollup", "Pss")
        peak_kb += kilobytes(process_id, "status", "VmHWM") - (resident - fair_share)
        now_kb += fair_share
    return {"peak_bytes": peak_kb * 1024, "resident_bytes": now_kb * 1024}


def shared_memory_bytes(process_ids: Iterable[int]) -> int:
    """Bytes of shared memory that processes have mapped, each counted once."""
    return sum(kilobytes(pid, "smaps_rollup", "Pss_Shmem") for pid in process_ids) * 1024


def mapped_bytes(process_ids: Iterable[int]) -> int:
    """Bytes of all pages that processes have mapped, each counted once.

    Unlike a sum of proportional set sizes it is the same whoever else maps them. 0 where the kernel
    does not say: only root may read which pages they are.
    """
    return page_frames(process_ids).size * PAGE_BYTES


def page_frames(process_ids: Iterable[int], of_files: bool = False) -> np.ndarray:
    """The page frames, uint64, sorted and unique, that processes have mapped, or of files alone.

    None where the kernel does not say which they are.
    """
    frames = [np.zeros(0, np.uint64)]
    for process_id in process_ids:
        with suppress(OSError), open(f"/proc/{process_id}/pagemap", "rb") as entries:
            for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
                addresses, _, _, _, inode, *_ = line.split()
                first, last = (int(end, 16) // PAGE_BYTES for end in addresses.split("-"))
                # The last one, a page of the kernel's, is not listed.
                if first < 1 << 47 - 12 and not (of_files and inode == "0"):
                    entries.seek(8 * first)
                    found = np.frombuffer(entries.read(8 * (last - first)), np.uint64)
                    frames.append(found[found & _IS_THERE != 0] & _FRAME)
    return np.setdiff1d(np.concatenate(frames), [0])


def kilobytes(process_id: int, file: str, key: str) -> int:
    """A number of /proc/PID/FILE; 0 where the process has ended."""
    try:
        text = Path(f"/proc/{process_id}/{file}").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{key}:")]
    return int(found[0]) if found else 0
