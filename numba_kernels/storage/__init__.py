"""Offloaded neurons: reads from a bundle file, slots in memory, the FFN over them."""

# Reads of the file in flight at once.
RING_DEPTH = 128  # of one thread with io_uring
READ_BYTES = 256 << 10  # the most of one read
MAX_GAP = 16 << 10  # between neighbours of one read; a larger gap takes longer than another read
NUM_THREADS = 16  # without it: threads, each with one read
