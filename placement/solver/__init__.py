"""The placement as an integer program: devices, costs, and its solution."""
