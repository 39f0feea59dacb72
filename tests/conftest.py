"""Shared by all tests: one thread (bit-equal sums), and where the reference data lies."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SHARED", ROOT.parent / "shared"))


def shared(name: str) -> Path:
    """A file of ../shared (or $SHARED); the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path
