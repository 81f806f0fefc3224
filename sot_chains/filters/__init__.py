"""Stream filters: text in, text out, one fault each."""
