"""Label sets for classifiers: scores of labels, their tuning, and the methods made of them."""
