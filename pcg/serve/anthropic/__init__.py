"""Anthropic's API: messages with tools, whole and as events."""
