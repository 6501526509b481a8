"""Graphs to learn from; each folder is one, with its data."""
