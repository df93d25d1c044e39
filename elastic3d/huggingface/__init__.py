"""Checkpoints as folders that `from_pretrained` of transformers loads.

describing    the configuration that goes into the folder: recorded in the checkpoint, or of another folder
architecture  the tensors that a class of transformers has, and what its files call them; only this imports transformers
fitting       the checkpoint's tensors beside those: which file tensor is which part of which
writing       the folder
"""
