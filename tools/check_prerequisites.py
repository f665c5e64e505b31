"""Says in one line what a machine lacks to build this project. Runs on any Python 3."""

import importlib.util
import shutil
import sys


def missing() -> "list[str]":
    """What is not there, each with the Debian package that brings it."""
    found = []
    if sys.version_info < (3, 10):  # noqa: UP036  (that is the question here)
        this = ".".join(str(part) for part in sys.version_info[:2])
        found.append("Python 3.10 or newer (this is " + this + "; choose another with make PYTHON=...)")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        found.append("Python's venv module (Debian: apt-get install python3-venv)")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        found.append("a C++ compiler (Debian: apt-get install g++)")
    return found


if __name__ == "__main__":
    lacking = missing()
    for what in lacking:
        print("missing:", what, file=sys.stderr)
    sys.exit(1 if lacking else 0)
