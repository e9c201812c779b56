"""What a running system shows of itself: neurons, speed, times, health of its actors."""
