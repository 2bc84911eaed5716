"""One HTML page of a reproduction."""
