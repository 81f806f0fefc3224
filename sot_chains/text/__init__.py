"""Pure functions of text: outlines, requests, replies, conversations. No model is known here."""
