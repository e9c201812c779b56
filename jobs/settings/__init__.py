"""Options given by the environment or by a file, and what makes the command line easy to type."""
