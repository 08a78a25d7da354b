"""The Responses API: items in and out, their streams, and the responses that are kept."""
