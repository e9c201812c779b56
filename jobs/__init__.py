"""Mains: the command line, and what `ray job submit` runs."""
