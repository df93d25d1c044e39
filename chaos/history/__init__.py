"""What happened to a job, from its event files alone.

follow        steps, generations, checkpoints and errors; claims: whom it names as being at fault, and who commits
"""
