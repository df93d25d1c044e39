"""The state machine of one member: no I/O, no clock; the same in a job, in a story and in a simulation.

core          takes in events, and returns what to do about them
view          what it knows of the job: the board, and for a leader the roll with its reports
world         what follows from a generation alone
trainers      its own trainers, brought to where the records want them
neighbours    whom it hears
campaign      when it tries to lead; commits: what a leader does for checkpoints
alarm         when it wants to be woken
leader        what the leader decides, keeping its notes in `lead`, from these:
  losses        why a generation cannot go on
  suspicion     who is cut off; silence: what to do about it
  forming       who forms the next generation
  planned       changes that can wait for a step boundary; drains: those that cannot wait long
  funerals      who is buried; chores: what is tidied up
"""
