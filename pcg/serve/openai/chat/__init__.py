"""Chat completions: messages, tools, response formats, and their streams."""
