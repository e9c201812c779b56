"""The running system: a driver, services with attention, CPU services, and their exchange."""
