"""Quantizers that are not ours, each run in a virtual environment of its own from pinned versions: the yardsticks."""
