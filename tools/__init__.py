"""Generators of parts of the repository from others: pages of the reference, and figures in `docs/assets`."""
