"""What every method gives on small fixed problems, recorded, to compare with after changes."""
