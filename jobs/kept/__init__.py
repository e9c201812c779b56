"""Kept systems: the registry of running ones, their daemons, and the client of commands."""
