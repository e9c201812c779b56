"""What two processes agree on: the arena, messages, failures, sizes of steps and pages."""
