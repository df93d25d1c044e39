"""Break real clusters of real processes, and judge what came of it."""
