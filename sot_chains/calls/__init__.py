"""One model call: rate limits, retries, usage, and what an answer records of its calls."""
