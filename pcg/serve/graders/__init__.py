"""OpenAI's graders over HTTP, and what they need of a server: judges and the sandbox."""
