"""The native kernels again, built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ["test_kernels.py", "test_returns.py", "test_attention.py", "test_replay.py"]
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# Puts the sanitized build in the place of the installed one.
RUN_TESTS = """
import importlib.util, sys, fastrl, pytest
spec = importlib.util.spec_from_file_location("fastrl._native", sys.argv[1])
fastrl._native = sys.modules["fastrl._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fastrl._native)
chosen = "native or list_of_episodes or threads or fused and not compiles"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, *sys.argv[2:]]))
"""


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result


def runtime_library(compiler: str, name: str) -> str:
    return run([compiler, f"-print-file-name={name}"]).stdout.strip()


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no g++ (or $CXX) on this machine")
    if not Path(runtime_library(found, "libasan.so")).is_absolute():
        pytest.skip(f"{found} brings no libasan.so")
    return found


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory, compiler) -> Path:
    """The extension module built with -DSANITIZE=ON."""
    build = tmp_path_factory.mktemp("sanitized")
    cmake = shutil.which("cmake", path=SEARCH_PATH)
    assert cmake, 'cmake is missing: pip install ".[test]"'
    nanobind = run([sys.executable, "-m", "nanobind", "--cmake_dir"]).stdout.strip()
    options = {
        "SANITIZE": "ON",
        "CMAKE_BUILD_TYPE": "Debug",  # compiles faster and turns on nanobind's own checks
        "CMAKE_CXX_COMPILER": compiler,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind,
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run([cmake, "-S", str(ROOT / "csrc"), "-B", str(build), *definitions])
    run([cmake, "--build", str(build), "--parallel", "4"])
    return next(build.glob("_native*.so"))


@pytest.fixture(scope="module")
def environment(compiler) -> dict[str, str]:
    preload = [runtime_library(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    options = {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory to the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return os.environ | options


def test_kernels_are_clean_under_the_sanitizers(sanitized, environment):
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    result = run([sys.executable, "-c", RUN_TESTS, str(sanitized), *tests], env=environment, cwd=ROOT)
    assert " passed" in result.stdout


def test_the_sanitizers_are_awake(sanitized, environment):
    # A use after free in this process, through the runtime that the tests above ran with.
    program = "import ctypes as c; l = c.CDLL(None); l.malloc.restype = c.c_void_p; p = c.c_void_p(l.malloc(64)); \
l.free(p); l.memset(p, 0, 64)"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "heap-use-after-free" in result.stderr
