"""The driver's work: requests, the scheduler, and one step of the model after another."""
