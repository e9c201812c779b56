"""A job's files of requests and answers, and the system that it uses."""
