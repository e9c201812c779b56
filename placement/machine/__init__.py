"""What a machine has and how fast it is: described, measured, kept."""
