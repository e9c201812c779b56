"""The driver: requests, the scheduler, the engine that runs one step after another."""
