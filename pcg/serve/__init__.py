"""The HTTP server: OpenAI's API over the engine, adapters as models, closed by default."""
