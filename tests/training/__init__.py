"""What a run goes on from, and what it leaves."""
