"""Sets whose expected loss is controlled, for any bounded loss that never grows with the set."""
