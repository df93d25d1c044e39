"""State that outlives a trainer: shared memory at home, a copy at the buddy, and a server that the run fetches from."""
