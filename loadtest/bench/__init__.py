"""Measurements of single rooms, each a module with a `main`."""
