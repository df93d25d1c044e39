"""Where objects are kept: one small protocol, and the places that speak it."""
