"""The decoding loop, and the thread it runs on."""
