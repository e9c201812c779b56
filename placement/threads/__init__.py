"""Which cores and memory the threads of services get."""
