"""The state machine of one member: no I/O, no clock; the same in a job, in a story and in a simulation.

core          takes in events, and returns what to do about them
view          what it knows of the job: the board, and for a leader the roster with its reports
trainers      its own trainers, brought to the state that the records ask for
neighbours    which nodes it hears; reach: which ports it cannot connect to
campaign      when it tries to lead; commits: what a leader does for checkpoints
alarm         when it wants to be woken
generation_index  what follows from a generation alone
situation     what a decision looks at, in one value
leader        what the leader decides, keeping its notes in `leader_state`, from these:
  convictions       from which states nobody goes on, since a device computes wrongly or the loss jumped up
  triggers          why a generation cannot go on; script_errors: whose code raised, and whether trying again helps
  damping           how fast generations may follow each other; flaps: machines that are lost again and again
  partition         which nodes are cut off; suspicions: since when; failure_detector: which of them are dead
  apart             which nodes stand aside for pairs without a connection
  forming           which nodes form the next generation
  planned           changes that can wait for a step boundary; drains: those that cannot wait long
  evictions         which nodes are put out; chores: what is tidied up
"""
