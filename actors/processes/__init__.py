"""The Ray actors around driver, services and relays, and what changes their number."""
