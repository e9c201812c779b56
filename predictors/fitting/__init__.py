"""Fits predictors and thresholds to FFN inputs that `hotcold profile` recorded."""
