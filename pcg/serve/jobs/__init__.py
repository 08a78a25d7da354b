"""OpenAI's fine-tuning jobs, run by the engine that serves."""
