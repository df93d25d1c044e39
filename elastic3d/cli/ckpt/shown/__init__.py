"""How what `checkpointing.looking` finds is shown to a person, in terminals of any width."""
