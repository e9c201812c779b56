"""Decisions before and while a system starts: checks, memory, modes, shards, hosts."""
