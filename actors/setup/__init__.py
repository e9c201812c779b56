"""What is decided before and while a system starts: checks, placement, shards, hosts."""
