"""Offloaded neurons: reads from a bundle file, slots in memory, the FFN over them."""

# Reads of the file in flight at once.
RING_DEPTH = 128  # of one thread with io_uring
BUSY_BYTES = 2 << 20  # of its reads; they keep a disk busy, and none is begun beyond
NUM_THREADS = 16  # without it: threads, each with one read
