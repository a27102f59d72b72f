from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fastrl import kernels


def gae_arguments(num_steps=6, num_envs=3, dtype=np.float32):
    real = np.ones((3, num_steps, num_envs), dtype)
    done = np.zeros((2, num_steps, num_envs), bool)
    return [*real, *done, 0.9, 0.8, np.empty((num_steps, num_envs), dtype)]


def test_all_kernels_are_available_in_a_full_install():
    assert kernels.available() == {"native": None, "numba": None, "reference": None}


def test_choose_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="kernels must be one of native, numba, reference; got 'cuda'"):
        kernels.choose("cuda")


def test_choose_says_what_to_do_without_the_native_build(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastrl._native", None)  # makes the import fail
    with pytest.raises(ValueError, match="native kernels are not available") as caught:
        kernels.choose("native")
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install ." in message
    assert "--kernels numba" in message
    assert kernels.available()["native"] == message
    assert kernels.available()["numba"] is None


@pytest.mark.parametrize("position", range(8))
def test_native_gae_refuses_another_dtype_instead_of_copying(position):
    arguments = gae_arguments()
    if position in (5, 6):
        arguments[position] = "0.9"
    else:
        arguments[position] = arguments[position].astype(np.int32)
    with pytest.raises(TypeError):
        kernels.choose("native").gae(*arguments)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 7])
def test_native_gae_refuses_another_layout_or_shape(position):
    native = kernels.choose("native")
    for change in (lambda a: np.asfortranarray(a), lambda a: a[:, 0]):
        arguments = gae_arguments()
        arguments[position] = change(arguments[position])
        with pytest.raises(TypeError):
            native.gae(*arguments)
    arguments = gae_arguments()
    arguments[position] = arguments[position][:-1]
    with pytest.raises(ValueError, match="axis 0 has length"):
        native.gae(*arguments)


def test_native_gae_reads_read_only_inputs_but_never_writes_a_read_only_output():
    arguments = gae_arguments()
    for array in arguments[:5]:
        array.setflags(write=False)
    kernels.choose("native").gae(*arguments)
    arguments[7].setflags(write=False)
    with pytest.raises(TypeError):
        kernels.choose("native").gae(*arguments)


@pytest.mark.parametrize("name", ["native", "numba"])
def test_gae_lets_other_threads_run(name):
    gae = kernels.choose(name).gae
    gae(*gae_arguments())  # compile
    arguments = gae_arguments(4000, 4000)
    span = []

    def call() -> None:
        start = time.perf_counter()
        gae(*arguments)
        span.extend((start, time.perf_counter()))

    thread = threading.Thread(target=call)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    start, end = span
    margin = 0.1 * (end - start)
    assert any(start + margin < tick < end - margin for tick in ticks)


def test_numba_kernels_work_without_a_place_for_their_cache(tmp_path):
    installed = Path(kernels.__file__).parent
    package = tmp_path / "fastrl" / "kernels"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fastrl" / "__init__.py").touch()
    (package / "__pycache__").touch()  # a file where Numba wants a folder stops root too, unlike permissions
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.meta_path[:] = [f for f in sys.meta_path if not "
        "type(f).__name__.startswith('ScikitBuild')]\n"
        "import numpy as np; from fastrl import kernels; assert kernels.__file__.startswith(sys.argv[1])\n"
        "ones, done, out = np.ones((2, 1), 'f4'), np.zeros((2, 1), bool), np.empty((2, 1), 'f4')\n"
        "kernels.choose('numba').gae(ones, ones, ones, done, done, 1.0, 1.0, out); print(out.sum())"
    )
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {"HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=env, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "3.0"
