"""How predictors are made: inputs that were recorded, a fit for each layer, its thresholds."""
