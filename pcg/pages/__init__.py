"""Shared parts of all pages: head, style, tables and charts."""
