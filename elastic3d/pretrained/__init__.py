"""Pretrained weights: how files and models name them, how a run begins with them, and how adapters are written."""
