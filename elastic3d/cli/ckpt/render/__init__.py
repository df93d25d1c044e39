"""How what `checkpointing.inspection` finds is shown to a person, in terminals of any width."""
