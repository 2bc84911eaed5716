"""Run a network, cut it at named layers and differentiate it; nothing here knows statistics."""
