"""The text to train on: documents, tokens, batches."""
