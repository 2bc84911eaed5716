"""The tables of the paper with our numbers beside the printed ones."""
