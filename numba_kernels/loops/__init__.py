"""Loops of the driver's and the services' threads: doorbells, requests, work stealing."""
