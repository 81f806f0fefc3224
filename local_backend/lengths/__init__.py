"""Trained predictors of answer length, and the log they are trained on."""
