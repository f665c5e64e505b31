import sys
from pathlib import Path

import pytest
import torch

# The tests' own modules (support, naive, formulas): with --import-mode=importlib their folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from support import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every backend that this machine and this build have."""
    return request.param


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
