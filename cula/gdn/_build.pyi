# The module itself is written by the build (cmake/_build.py.in).
VERSION: str
COMMIT: str
COMPILER: str
BUILD_TYPE: str
INSTRUCTION_SETS: str
CUDA: str
