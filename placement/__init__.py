"""Offline, without Ray: the machine, activation profiles, memory needs, placement plans."""
