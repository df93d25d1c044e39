"""Break real clusters of real processes, and judge the outcome."""
