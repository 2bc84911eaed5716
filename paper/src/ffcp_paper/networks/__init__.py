"""The networks of the paper, and loaders of pretrained ones."""
