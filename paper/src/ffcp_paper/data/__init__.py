"""Files, parsers and splits of the data sets, and the cache of computed results."""
