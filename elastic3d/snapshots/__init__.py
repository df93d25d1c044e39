"""State that outlives a trainer: shared memory at home, a copy at the buddy, and a server anybody may fetch from."""
