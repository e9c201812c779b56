"""Numbers of bytes as people read them."""


def size_text(num_bytes: float) -> str:
    """In powers of 1000, as of files: 12.30 GB, 137.1 MB, 4.1 kB, 12 B."""
    return _text(num_bytes, 1000, ("GB", "MB", "kB"))


def binary_text(num_bytes: float) -> str:
    """In powers of 1024, as of memory: 12.30 GiB, 137.1 MiB, 4.1 KiB, 12 B."""
    return _text(num_bytes, 1024, ("GiB", "MiB", "KiB"))


def _text(num_bytes: float, base: int, units: tuple[str, str, str]) -> str:
    """In the largest unit of which there is one, once it is rounded."""
    for power, unit in zip((3, 2, 1), units, strict=True):
        if num_bytes >= base**power - 0.05 * base ** (power - 1):
            return f"{num_bytes / base**power:.{2 if power == 3 else 1}f} {unit}"
    return f"{num_bytes:.0f} B"
