"""The frame that all pages share: their head, their style, tables and figures."""
