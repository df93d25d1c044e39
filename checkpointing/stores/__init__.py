"""Where objects are kept: one small protocol, and its implementations."""
