"""A trained predictor of answer length, and the log it is trained on."""
