"""Offloaded neurons: reads from a bundle file, slots in memory, the FFN over them."""

# Reads of the file in flight at once.
RING_DEPTH = 128  # of one thread with io_uring
NUM_THREADS = 16  # without it: threads, each with one read
