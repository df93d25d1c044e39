"""Processes of a node: keepers, templates and trainers, and what passes between them."""
