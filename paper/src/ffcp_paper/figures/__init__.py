"""The figures of the paper, drawn with our data."""
