"""The part of a report that is about ranks: layouts, exchanges, and pipeline stages."""
