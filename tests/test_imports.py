"""Imports go down only: which module may know which. Also: `import fastrl` is light."""

from __future__ import annotations

import ast
import site
import subprocess
import sys
from pathlib import Path

import pytest

import fastrl

PACKAGE = Path(fastrl.__file__).parent
FLOORS = {
    4: {"ppo", "dqn", "dqn_config", "dqn_learner", "dqn_ray"},
    3: {"evaluate", "plot", "dqn_actors"},
    2: {"envs"},
    1: {"returns", "losses", "replay", "networks", "attention"},
    0: {"types", "config", "schedules", "timing", "logger", "checkpoint", "runtime", "kernels", "_native"},
}
FLOOR = {part: floor for floor, parts in FLOORS.items() for part in parts}
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
HEAVY = ("ale_py", "cv2", "envpool", "imageio", "matplotlib", "ray", "tensorboard", "wandb")


def imported_modules(source: str) -> set[str]:
    """The dotted name of every module that `source` imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "fastrl imports by absolute name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_of_fastrl(source: str) -> set[str]:
    """The parts of fastrl that `source` imports: "envs" for fastrl.envs.contract, and so on."""
    dotted = (name.split(".") for name in imported_modules(source))
    return {name[1] for name in dotted if name[0] == "fastrl" and len(name) > 1} - {"__version__"}


def part(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    imported = parts_of_fastrl((PACKAGE / module).read_text())
    if module == "__init__.py":
        assert not imported
        return
    assert part(module) in FLOOR, f"give {part(module)} a floor in {Path(__file__).name} and in the docs"
    for other in imported - {part(module)}:
        assert FLOOR.get(other, 9) <= FLOOR[part(module)], f"{module} imports {other} from a floor above"
        floors = {FLOOR[part(module)], FLOOR[other]}
        assert floors != {1, 2}, f"{module} imports {other}: envs and learning parts do not know each other"


def test_parts_of_one_floor_import_each_other_in_one_direction():
    graph = {name: set() for name in FLOOR}
    for module in MODULES:
        graph.setdefault(part(module), set()).update(parts_of_fastrl((PACKAGE / module).read_text()) - {part(module)})
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other in a circle: {sorted(graph)}"


def test_the_check_itself_sees_every_form_of_import():
    source = "import fastrl.ppo\ndef f():\n    from fastrl import envs\n    from fastrl.kernels.numba import gae as g"
    assert parts_of_fastrl(source) == {"ppo", "envs", "kernels"}


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(module):
    body = ast.parse((PACKAGE / module).read_text()).body
    at_the_top = ast.unparse([node for node in body if isinstance(node, ast.Import | ast.ImportFrom)])
    used = {"ray"} if module == "dqn_ray.py" else set()  # itself imported where it is used
    heavy = {name for name in imported_modules(at_the_top) if name.split(".")[0] in set(HEAVY) - used}
    assert not heavy, f"{module} imports {heavy} at its top"


def test_import_fastrl_is_light():
    program = "import sys, fastrl; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "envpool", "ale_py", "gymnasium", "numba", "numpy"} & set(loaded)


def test_stepping_an_env_does_without_torch():
    program = (
        "import sys; from fastrl.envs import EnvConfig, EpisodeStats, make_envs; "
        "envs = make_envs(EnvConfig(env_id='CartPole-v1', backend='numpy'), 2, 0); envs.reset(); envs.step([0, 1]); "
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "envpool", "numba", "tyro"} & set(loaded)


def test_import_from_a_checkout_finds_what_only_the_installed_package_has(tmp_path):
    """`python -m fastrl.ppo` in a clone after `pip install .`: the compiled module lies in site-packages."""
    (tmp_path / "fastrl").mkdir()
    (tmp_path / "fastrl" / "__init__.py").touch()
    (tmp_path / "fastrl" / "only_installed.py").write_text("found = True")
    code = "import sys; sys.path[:0] = sys.argv[1:]; import fastrl.only_installed as _; from fastrl import types as t"
    command = [
        sys.executable,
        "-S",
        "-c",
        f"{code}; print(t.__file__)",
        str(PACKAGE.parent),
        str(tmp_path),
        *site.getsitepackages(),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert Path(output.strip()) == PACKAGE / "types.py"
