"""The kernel that sums the squares of rows, as Triton's interpreter runs it on the host.

torch's builds for CUDA and ROCm bring Triton, those for CPUs do not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

SCRIPT = """
import torch
from elastic3d.devices import square_kernel
from elastic3d.parallel.norms import fold

for dtype in (torch.float32, torch.bfloat16, torch.float64):
    for length in (1, 2, 16, 48, 1024, 1536, 8192, 11008):
        matrices = [torch.randn(rows, length).to(dtype) for rows in (3, 1, 7)]
        expected = fold(torch.cat(matrices).to(torch.float64).square_())
        sums = square_kernel.square_rows(matrices, fold)
        assert sums is not None and torch.equal(sums, expected), (dtype, length)
for length in (3, 20):
    assert square_kernel.square_rows([torch.ones(2, length)], fold) is None
print("as fold")
"""


def test_the_kernel_has_the_bits_of_the_fold() -> None:
    """For widths that are powers of two, multiples of one, and longer than a program holds; others are not for it."""
    pytest.importorskip("triton")
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=interpreted)
    assert done.stdout.strip() == "as fold", done.stderr
