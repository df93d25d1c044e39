"""The demo's training script, on a device that is emulated."""

from __future__ import annotations

import runpy

from chaos.gpu import emulated_device
from chaos.playing.setting import TRAIN_GPT

if __name__ == "__main__":
    emulated_device.install()
    runpy.run_path(str(TRAIN_GPT), run_name="__main__")
