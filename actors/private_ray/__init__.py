"""A private Ray with the fewest processes, closed to other users, with forked workers."""
