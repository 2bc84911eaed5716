"""FCP: scores by moving the feature, bands by bounding the head over a ball."""
