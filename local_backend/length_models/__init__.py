"""Predictors of an answer's length that are trained, and the log they learn from."""
