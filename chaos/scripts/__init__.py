def mark_of(step: int) -> str:
    """Return the file in `--out` in which `train_faulty` says that it failed at a step, when, and on which rank."""
    return f"fault-{step}.json"


ASKED = "asked-layout"
"""The file in which `any_script` leaves the layout that a script asks for, as `Layout.request` writes it."""
SECOND = "second-fault.json"
"""The same of the second one of two ranks that fail together."""
