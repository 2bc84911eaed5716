"""Training of the networks that are not pretrained."""
