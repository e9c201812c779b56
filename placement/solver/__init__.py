"""The placement as an integer program: devices, costs, solution."""
