MARK = "fault.json"
"""The file in `--out` in which `train_faulty` says that it has failed, when, and on which rank."""
