"""OpenAI's fine-tuning jobs, run by the serving engine."""
