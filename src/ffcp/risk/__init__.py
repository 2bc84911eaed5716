"""Risk control: sets whose expected loss is controlled, for bounded losses."""
