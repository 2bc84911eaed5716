"""FCP: scores by moving the feature, intervals by bounding the head over a ball."""
