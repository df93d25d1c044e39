"""The first keeper of a node, which speaks for it: its generations, and how they begin, go on and end."""
