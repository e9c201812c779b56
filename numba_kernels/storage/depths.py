"""How many reads of a file are under way at once."""

RING_DEPTH = 128  # by one thread, where there is io_uring
NUM_THREADS = 16  # else, each with a read of its own
