"""Predictors of the neurons that fire for a token, their files, and how they are fitted."""
