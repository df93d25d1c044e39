"""The processes of a slot: its template and trainers, and how their keeper starts, hears and stops them."""
