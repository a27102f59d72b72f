"""What every vector of environments offers, and the settings that choose one."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fastrl.config import check_types
from fastrl.runtime import available_cores
from fastrl.types import Step

ATARI_SETTINGS = {
    "v5": dict(sticky=0.25, noop_max=0, fire_reset=False, episodic_life=False, clip_rewards=False),
    "baselines": dict(sticky=0.0, noop_max=30, fire_reset=True, episodic_life=True, clip_rewards=True),
}
ATARI_COMMON = dict(frame_skip=4, stack=4, full_action_space=False, max_episode_frames=108_000)

# What the Atari fields come to in any other env. The env itself decides where this says None.
NEUTRAL = dict(
    frame_skip=1,
    stack=None,
    sticky=0.0,
    noop_max=0,
    fire_reset=False,
    episodic_life=False,
    clip_rewards=False,
    full_action_space=False,
    max_episode_frames=None,
    max_pool=False,
)
ATARI_ONLY = tuple(name for name in NEUTRAL if name not in ("stack", "clip_rewards"))

# EnvPool holds many more; these are the ones that the tests compare with Gymnasium's.
ENVPOOL_CLASSIC = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0")
ONE_THREAD = ("gymnasium", "numpy")


class CartPole(NamedTuple):
    """One variant of CartPole."""

    max_steps: int
    """After which an episode is truncated."""
    sleep_s: float = 0.0
    """How much longer each step takes."""


SLOW_CARTPOLE = "SlowCartPole-v0"
CARTPOLES = {"CartPole-v0": CartPole(200), "CartPole-v1": CartPole(500), SLOW_CARTPOLE: CartPole(200, sleep_s=0.01)}


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment, stepped by which backend, and how it is prepared for the learner.

    A field left at None takes the value of `env_setting`; `resolved()` fills it in.
    """

    env_id: str = "ALE/Pong-v5"
    """Environment: ALE/Pong-v5 or Pong-v5 (any Atari game), CartPole-v1, or any Gymnasium env with discrete actions
    (module:Name-v0 imports the module that registers it)."""
    backend: Literal["envpool", "ale", "numpy", "gymnasium"] = "envpool"
    """What steps it: envpool (batched C++), ale (ale-py's batched C++, Atari only), numpy (CartPole only, all envs in
    one array), gymnasium (the plain reference)."""
    env_setting: Literal["v5", "baselines"] = "v5"
    """Atari defaults: v5 (sticky 0.25, whole games, raw reward) or baselines (no-ops, FIRE, lives, clipped reward)."""
    frame_skip: int | None = None
    """Emulator frames per agent step (Atari; 4)."""
    stack: int | None = None
    """Frames per observation (Atari and other image envs; 4)."""
    sticky: float | None = None
    """Probability that the emulator repeats the previous action (Atari; v5 0.25, baselines 0)."""
    noop_max: int | None = None
    """Random no-op frames at most when a game starts (Atari; v5 0, baselines 30). EnvPool plays one no-op frame for 0
    unless it presses FIRE."""
    fire_reset: bool | None = None
    """Press FIRE once when a game starts, where the game has that button (Atari; v5 no, baselines yes)."""
    episodic_life: bool | None = None
    """A lost life ends the learning episode while the game goes on (Atari; v5 no, baselines yes)."""
    clip_rewards: bool | None = None
    """Learn from the sign of the reward; statistics keep the raw one (v5 no, baselines yes)."""
    full_action_space: bool | None = None
    """All 18 joystick actions instead of the ones the game uses (Atari; no)."""
    max_episode_frames: int | None = None
    """Emulator frames after which a game is truncated, rounded up to whole agent steps (Atari; 108000). The no-ops of
    the start count, except on envpool."""
    max_pool: bool | None = None
    """Observe the maximum of the last two emulator frames (Atari). EnvPool always does when frame_skip > 1, the others
    with baselines only."""
    threads: int | None = None
    """Threads that step envs (envpool and ale; as many as cores this process may use, at most one per env)."""
    stack_padding: Literal["repeat", "zero"] = "repeat"
    """What fills a new episode's frame stack: its first frame, or zeros (not envpool; for parity tests)."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """next_step: a done row shows the terminal observation and the following row is the reset. same_step: a done row
    already shows the new episode, so there is no observation left that a truncation could bootstrap from (gymnasium
    only, with --time-limit silent)."""
    time_limit: Literal["truncate", "silent"] = "truncate"
    """silent: ignore the env's own time limit, and reset unmarked after loop_cap_steps (gymnasium only)."""
    loop_cap_steps: int = 100_000
    """Agent steps after which `--time-limit silent` begins a new episode."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("frame_skip", "stack", "max_episode_frames", "threads", "loop_cap_steps"):
            _check_int(name, getattr(self, name), minimum=1)
        _check_int("noop_max", self.noop_max, minimum=0)
        if self.sticky is not None and not 0 <= self.sticky <= 1:
            raise ValueError(f"sticky must be a probability between 0 and 1, got {self.sticky}")
        if self.backend != "gymnasium":
            for name, value in (("autoreset", "same_step"), ("time_limit", "silent")):
                if getattr(self, name) == value:
                    raise ValueError(f"{name}={value!r} needs --backend gymnasium, got backend {self.backend!r}")
        if self.autoreset == "same_step" and self.time_limit != "silent":
            raise ValueError("autoreset='same_step' loses the observation a truncation needs: add --time-limit silent")
        if self.backend == "envpool" and self.stack_padding == "zero":
            raise ValueError("stack_padding='zero' cannot be had from EnvPool: use --backend ale or gymnasium")

    @property
    def atari_game(self) -> str | None:
        """`Pong` for `ALE/Pong-v5` and `Pong-v5`; None if this is no Atari game."""
        return atari_game(self.env_id)

    def resolved(self) -> Self:
        """A copy with every None filled in for this env and backend.

        In a non-Atari env two fields stay None because the env decides: `stack` (4 for images, 1 for vectors) and
        `max_episode_frames` (its own time limit).

        Raises: ValueError if the env is unknown, or a flag does not apply to this env or backend.
        """
        if self.backend != "numpy" or self.env_id not in CARTPOLES:  # those are known without Gymnasium
            check_env_id(self.env_id)
        if self.backend in ONE_THREAD and self.threads not in (None, 1):
            raise ValueError(f"backend {self.backend!r} steps in one thread, got threads {self.threads}: leave it out")
        filled: dict[str, Any] = dict(threads=1 if self.backend in ONE_THREAD else available_cores())
        if self.backend == "numpy" and self.env_id not in CARTPOLES:
            raise ValueError(
                f"backend 'numpy' steps {', '.join(CARTPOLES)}, got env_id {self.env_id!r}: use another --backend"
            )
        if self.atari_game:
            filled |= ATARI_COMMON | ATARI_SETTINGS[self.env_setting]
            frame_skip = self.frame_skip or filled["frame_skip"]
            pooled = frame_skip > 1 and (self.backend == "envpool" or self.env_setting == "baselines")
            filled["max_pool"] = pooled
            if self.backend == "envpool" and self.max_pool not in (None, pooled):
                raise ValueError(
                    f"max_pool={self.max_pool} with frame_skip {frame_skip} cannot be had from EnvPool, which pools "
                    "exactly when frame_skip > 1: use --backend ale or gymnasium"
                )
        else:
            _check_not_atari(self)
            filled |= NEUTRAL
        return replace(self, **{name: value for name, value in filled.items() if getattr(self, name) is None})


class VecEnv(ABC):
    """N copies of one environment, stepped together.

    After an ended row (`terminated` of the whole game, or `truncated`) the next `step` ignores that env's action and
    answers with the first observation of a new episode, `was_reset` set and reward 0. After a lost life
    (`terminated` without `game_over`) the game goes on; `was_reset` of the next row says whether that backend ignored
    the action there. Every row is one of running, life lost, terminated, truncated, reset; a step that reaches its
    time limit is `truncated`, whatever else happened on it. Returned arrays are never written to again.
    """

    num_envs: int
    obs_shape: tuple[int, ...]
    """(stack, 84, 84) for images, (S,) for vectors."""
    obs_dtype: np.dtype
    num_actions: int
    action_meanings: tuple[str, ...] | None = None
    can_restore: bool = False
    """Whether `state_dict` and `load_state_dict` work."""

    @abstractmethod
    def reset(self) -> np.ndarray:
        """Begin a new episode in every env. Returns obs [N, *obs_shape]."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> Step:
        """Act in every env. actions: integers [N]. Raises ValueError on anything else, see `check_actions`."""

    @abstractmethod
    def close(self) -> None:
        """Free what the envs hold. The object cannot be used afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: tensors and primitives only."""
        raise ValueError(f"{type(self).__name__} cannot save its state: use --backend gymnasium")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of the same config and number of envs."""
        raise ValueError(f"{type(self).__name__} cannot restore a state: use --backend gymnasium")


def make_envs(config: EnvConfig, num_envs: int, seed: int | Sequence[int]) -> VecEnv:
    """The envs that a config describes.

    Args:
      config: an EnvConfig, with or without open fields.
      num_envs: N, at least 1.
      seed: spread to one seed per env; a sequence gives each env its own, unchanged.
    Raises: ValueError on an unknown env, a flag that does not apply, or a bad number of envs or seeds.
    """
    _check_int("num_envs", num_envs, minimum=1)
    config = config.resolved()
    seeds = env_seeds(seed, num_envs)
    if config.backend == "envpool":
        from fastrl.envs.envpool_env import EnvPoolEnv

        return EnvPoolEnv(config, seeds)
    if config.backend == "ale":
        from fastrl.envs.ale_env import AleEnv

        return AleEnv(config, seeds)
    if config.backend == "numpy":
        from fastrl.envs.cartpole_env import CartPoleEnv

        return CartPoleEnv(config, seeds)
    from fastrl.envs.gymnasium_env import GymnasiumEnv

    return GymnasiumEnv(config, seeds)


def resolve(config: EnvConfig, maker: Callable[[EnvConfig, int, int], VecEnv]) -> EnvConfig:
    """`config.resolved()`. Whoever brings a `maker` other than `make_envs` may have an env_id that only it knows."""
    try:
        return config.resolved()
    except ValueError:
        if maker is make_envs:
            raise
        return config


def env_seeds(seed: int | Sequence[int], num_envs: int) -> list[int]:
    """One seed in [0, 2^31) per env: an int is spread by NumPy's SeedSequence, a sequence is used as it is."""
    if isinstance(seed, int | np.integer):
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        # 31 bits: ALE and EnvPool read seeds as int32, and ALE ignores negative ones.
        return (np.random.SeedSequence(int(seed)).generate_state(num_envs) >> 1).tolist()
    seeds = [int(s) for s in seed]
    if len(seeds) != num_envs:
        raise ValueError(f"seed has {len(seeds)} values for {num_envs} envs: give one per env, or a single int")
    if min(seeds) < 0 or max(seeds) >= 2**31:
        raise ValueError(f"seeds must be in [0, 2**31), got {seeds}")
    return seeds


def check_actions(actions: Any, num_envs: int, num_actions: int) -> np.ndarray:
    """actions as int32 [N], each in [0, num_actions).

    Accepts NumPy integer arrays, CPU torch integer tensors and lists of ints.
    Raises: ValueError on another shape or dtype, or an action out of range. Native code would abort, hang or read out
    of bounds instead.
    """
    array = np.asarray(actions)
    if array.dtype.kind not in "iu":
        raise ValueError(f"actions must be integers, got dtype {array.dtype}")
    if array.shape != (num_envs,):
        raise ValueError(f"actions must have shape ({num_envs},), one per env, got {array.shape}")
    low, high = array.min(), array.max()
    if low < 0 or high >= num_actions:
        raise ValueError(f"actions must be between 0 and {num_actions - 1}, got {low} to {high}")
    return array.astype(np.int32)


def atari_game(env_id: str) -> str | None:
    """The game's CamelCase name if env_id is `ALE/<Game>-v5` or `<Game>-v5`, else None."""
    game = env_id.removeprefix("ALE/").removesuffix("-v5")
    return game if env_id.endswith("-v5") and f"ALE/{game}-v5" in _registry() else None


def rom_name(game: str) -> str:
    """ale-py's name of a game: `ms_pacman` for `MsPacman`."""
    return _registry()[f"ALE/{game}-v5"].kwargs["game"]


def check_env_id(env_id: str) -> None:
    """Raise a ValueError that suggests the likely name unless env_id is an Atari game or a registered Gymnasium env."""
    registry = _registry()
    if ":" in env_id:
        module, _, env_id = env_id.partition(":")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"env_id {module}:{env_id} names a module that cannot be imported: {error}") from error
    if atari_game(env_id):
        return
    old_atari = {name for name, spec in registry.items() if "ale_py" in str(spec.entry_point) and "ALE/" not in name}
    if env_id in old_atari:
        raise ValueError(
            f"env_id {env_id!r} is an old Atari name: write ALE/<Game>-v5, for example ALE/Pong-v5 "
            "(--env-setting baselines gives the NoFrameskip convention)"
        )
    if env_id in registry:
        return
    names = sorted(registry.keys() - old_atari)
    if not env_id.startswith("ALE/"):
        names = [name.removeprefix("ALE/") for name in names]
    close = difflib.get_close_matches(env_id, names, n=3, cutoff=0.75)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "python -c 'import gymnasium; gymnasium.pprint_registry()'"
    )
    raise ValueError(f"env_id {env_id!r} is unknown: {hint}")


def _registry() -> dict[str, Any]:
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)  # does nothing; it keeps the import, which registers ALE/*, from looking unused
    if SLOW_CARTPOLE not in gymnasium.registry:
        max_steps = CARTPOLES[SLOW_CARTPOLE].max_steps
        gymnasium.register(SLOW_CARTPOLE, "fastrl.envs.slow_cartpole:SlowCartPole", max_episode_steps=max_steps)
    return gymnasium.registry


def _check_not_atari(config: EnvConfig) -> None:
    if config.backend == "ale":
        raise ValueError(f"backend 'ale' steps Atari games only, got env_id {config.env_id!r}: use --backend gymnasium")
    if config.backend == "envpool" and config.env_id not in ENVPOOL_CLASSIC:
        raise ValueError(
            f"backend 'envpool' steps Atari games and {', '.join(ENVPOOL_CLASSIC)}, got env_id {config.env_id!r}: "
            f"use --backend {'numpy' if config.env_id in CARTPOLES else 'gymnasium'}"
        )
    atari_only = {name: getattr(config, name) for name in ATARI_ONLY if getattr(config, name) is not None}
    if config.env_setting != "v5":
        atari_only["env_setting"] = config.env_setting
    if config.backend in ("envpool", "numpy") and config.stack not in (None, 1):
        atari_only["stack"] = config.stack
    for name, value in atari_only.items():
        if value != NEUTRAL.get(name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} does not apply to {config.env_id}, got {value}: leave it out")


def _check_int(name: str, got: int | None, minimum: int) -> None:
    if got is not None and (isinstance(got, bool) or not isinstance(got, int | np.integer) or got < minimum):
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {got!r}")
    if got is not None and got >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {got}")
