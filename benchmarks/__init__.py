"""Side-by-side measurements; nothing imports this package."""
