"""OpenAI's files and uploads, kept in the server's store."""
