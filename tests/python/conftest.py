import sys
from pathlib import Path

import pytest
import torch

# The tests' own modules (support, naive, formulas): with --import-mode=importlib their folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from support import BACKENDS, backend_instead_of_auto


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        metavar="NAMES",
        help="backends to test, separated by commas (cpu, cuda, sm90), instead of all that this machine has; without "
        "cpu, only the tests that run by backend",
    )


def _chosen(config: pytest.Config) -> list[str]:
    option = config.getoption("--backends")
    if option is None:
        return list(BACKENDS)
    names = option.split(",")
    if absent := [name for name in names if name not in BACKENDS]:
        raise pytest.UsageError(f"--backends: expected some of {','.join(BACKENDS)}, got {','.join(absent)}")
    return names


def pytest_configure(config: pytest.Config) -> None:
    _chosen(config)  # a wrong name ends the run before anything is collected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _chosen(metafunc.config), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cpu" in _chosen(config):
        return
    by_backend = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in by_backend])
    items[:] = by_backend


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a backend. Calls that leave the choice to the library get that backend.

    sm90 takes what it can and leaves the rest to cuda, as for users who name none.
    """
    if request.param == "cpu":
        return "cpu"
    if torch.float64 in request.node.callspec.params.values():
        pytest.skip("the GPU backends take float32, bfloat16 and float16")
    if request.param == "cuda":
        backend_instead_of_auto("cuda", monkeypatch)
    return "cuda"


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that `device` stands for."""
    return request.node.callspec.params["device"]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
