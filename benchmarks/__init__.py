"""Time, memory and tightness, as ratios to hand-written code."""
