"""Data that comes in the order of time: levels that follow it, and alarms when it has moved."""
