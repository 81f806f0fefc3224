"""What a model is asked: wording, examples, the conversation."""
