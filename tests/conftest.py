"""One thread an operation, so that numbers do not depend on the machine and workers do not fight for cores."""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = sys.modules.get("torch")  # pure tests never import it
    if torch is not None:
        torch.set_num_threads(1)
