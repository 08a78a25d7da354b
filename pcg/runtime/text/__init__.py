"""Text to tokens and back: tokenizer, chat templates, streamed detokenizing, stop strings."""
