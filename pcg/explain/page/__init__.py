"""A report as one HTML page: `page.page(report)` puts together what the other files draw."""
