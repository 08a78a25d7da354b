"""The reports of explanations: their data, text and pages, and the figures of these."""
