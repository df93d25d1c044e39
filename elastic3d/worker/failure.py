"""How a keeper's failure reaches torchrun: its error file, in the format torchrun's own `record` writes."""

from __future__ import annotations

import json
import os
import sys
import time


def record(error: BaseException) -> None:
    """Write the error, with the trainer's traceback, where torchrun looks for it, and say it on stderr."""
    text = str(error)
    sys.stderr.write(f"elastic3d: {text}\n")
    sys.stderr.flush()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", "extraInfo": extra}
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump({"message": message}, file)
        except OSError as problem:
            sys.stderr.write(f"elastic3d: torchrun's error file {path} could not be written: {problem}\n")
