"""A machine plan as one HTML page: `page.page(plan)`."""
