"""The HTTP server: OpenAI's API over the engine, with adapters as models."""
