"""What can be done to a job: one catalogue of faults, one module for each place where they enter."""
