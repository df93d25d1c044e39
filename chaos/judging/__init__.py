"""What is to be said of a job that was played.

oracle        which promises it kept, by its own events and by an undisturbed run of the same seed
notices       who noticed what was done to it, and how soon
"""
