"""config.json of each family, read into one description: the shape of a model's layers."""
