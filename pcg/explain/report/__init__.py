"""Reports of explanations: data, text, HTML pages, and figures."""
