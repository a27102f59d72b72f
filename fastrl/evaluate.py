"""Play whole games with a trained policy: `python -m fastrl.evaluate RUN_OR_CHECKPOINT [--episodes 10] [--video]`.

Returns are raw (never clipped) and of whole games (lives do not end one), on fresh seeded environments. A policy of
PPO is sampled unless `--greedy`: Atari policies are usually judged that way, as their greedy version may get stuck in a
loop. A policy of DQN takes the action of the greatest value, or with probability `--epsilon` any.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import nn

from fastrl import checkpoint
from fastrl.config import parse, run_dir_of
from fastrl.envs import Act, EnvConfig, VecEnv, evaluate, explore, make_envs, whole_games
from fastrl.logger import summary
from fastrl.runtime import RunFailed, atomic_file, configure_torch, resolve_device, run_cli, user_errors
from fastrl.types import Episode


@dataclass(frozen=True)
class EvaluateConfig:
    """Play whole games with a trained policy and report their returns."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder (its newest checkpoint is used), or a checkpoint such as RUN/checkpoints/best."""
    episodes: int = 10
    """Games to play."""
    num_envs: int | None = None
    """Games played side by side (as many as episodes, at most 8; 1 with --video)."""
    seed: int = 1_000
    """Seed of the environments and of the sampled actions."""
    greedy: bool = False
    """PPO: take the likeliest action instead of sampling one."""
    epsilon: float | None = None
    """DQN: probability of a random action (what the run's own evaluations used)."""
    max_steps: int | None = None
    """Steps per environment after which unfinished games are given up (enough for every game at its full length)."""
    backend: Literal["envpool", "ale", "numpy", "gymnasium"] | None = None
    """What steps the environments (the one used in training; gymnasium with --video)."""
    device: str = "auto"
    """cpu, cuda, cuda:INDEX, or auto."""
    video: bool = False
    """Film each game in the true colours of the screen, one file per episode."""
    video_format: Literal["mp4", "gif"] = "mp4"
    """Format of the films."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for the results file and the films (RUN/evaluations)."""

    def __post_init__(self) -> None:
        for name in ("episodes", "num_envs", "max_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.epsilon is not None and not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be a probability between 0 and 1, got {self.epsilon}")
        if self.video and self.num_envs not in (None, 1):
            raise ValueError(f"--video films one game at a time: leave --num-envs out, got {self.num_envs}")
        if self.video and self.backend not in (None, "gymnasium"):
            raise ValueError(f"--video needs the screen, which --backend gymnasium has, got {self.backend}")

    @property
    def played_envs(self) -> int:
        return 1 if self.video else min(self.num_envs or 8, self.episodes)


def policy_act(
    network: nn.Module, device: torch.device | str, greedy: bool, seed: int, *, dropout: bool = False
) -> Act:
    """The policy of an actor-critic as an `Act`: its actions sampled or the likeliest.

    Args:
      network: an actor-critic, whose parameters stay as they are now; its training mode is as before after each call.
      device: where the network lives.
      greedy: take the likeliest action.
      seed: of the sampling, which has a generator of its own and so leaves the training's random numbers alone.
      dropout: leave dropout active (the prototype's evaluation); it draws from PyTorch's global generator.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        readout = network.readout()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        training = network.training
        network.train(dropout)
        logits, _ = network(torch.as_tensor(obs, device=device), readout)
        network.train(training)
        if not torch.isfinite(logits).all():  # sync: without the check a NaN becomes action 0
            raise RunFailed("evaluation: the policy's logits are not finite")
        if greedy:
            actions = logits.argmax(-1)
        else:
            actions = torch.multinomial(logits.float().softmax(-1), 1, generator=generator).squeeze(-1)
        return actions.cpu().numpy()  # sync: the one read per step

    return act


def q_act(network: nn.Module, device: torch.device | str, epsilon: float, seed: int) -> Act:
    """The epsilon-greedy policy of a Q-network as an `Act`; see `policy_act`."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        readout = network.readout()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        q_values = network(torch.as_tensor(obs, device=device), readout).cpu().numpy()  # sync: the one read per step
        if not np.isfinite(q_values).all():
            raise RunFailed("evaluation: the action values are not finite")
        return explore(q_values.argmax(axis=1), epsilon, q_values.shape[1], rng)

    return act


def load_policy(path: Path, device: torch.device) -> tuple[nn.Module, EnvConfig, dict[str, Any]]:
    """The network of a checkpoint, the config of the environment it learned in, and the whole checkpoint.

    Raises: ValueError if the file is damaged, not a policy's, or its weights do not fit its network.
    """
    from fastrl.networks import make_network, make_q_network

    state = checkpoint.load(path)
    if missing := [key for key in ("env", "network", "model") if key not in state]:
        raise ValueError(f"checkpoint {path} lacks {', '.join(map(repr, missing))}: it is not a policy saved by fastrl")
    network = (make_q_network if state.get("algo") == "dqn" else make_network)(**state["network"])
    try:
        network.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"checkpoint {path}: its weights do not fit its network: {error}") from error
    return network.to(device).eval(), EnvConfig(**state["env"]), state


def film(
    act: Act, envs: VecEnv, episodes: int, max_steps: int, folder: Path, name: str, kind: str, fps: float
) -> list[Episode]:
    """Play games one after another on the one env of `envs`, and film each to `folder/<name>_episode_<n>.<kind>`.

    A film has a picture of every state, the first and the last included: length + 1. It takes its name when it is
    complete, so that stopping early loses none of those before.

    Args: as `evaluate`; `envs` offers `render(env) -> uint8 [H, W, 3]`. `kind`: mp4 or gif.
    """
    finished: list[Episode] = []
    for number in range(1, episodes + 1):
        path = folder / f"{name}_episode_{number}.{kind}"
        partial = path.with_name(f"partial-{path.name}")
        try:
            with _open_film(partial, fps) as writer:

                def filmed(obs: np.ndarray, writer: Any = writer) -> np.ndarray:
                    writer.append_data(envs.render(0))
                    return act(obs)

                finished += evaluate(filmed, envs, 1, max_steps)
                writer.append_data(envs.render(0))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        print(path)
    return finished


def check_film(kind: str) -> None:
    """Raise a ValueError that names the install command unless films of this kind can be written."""
    try:
        import imageio.v2  # noqa: F401

        if kind == "mp4":
            import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise ValueError(f'--video needs a package that is missing: pip install "fastrl[video]" ({error})') from error


def report(episodes: Sequence[Episode], asked: int) -> str:
    """A table of episodes for people: each return and length, then mean, std (of the population), min and max."""
    lines = ["episode    return    length"]
    lines += [f"{i:7}  {episode.return_:8g}  {episode.length:8}" for i, episode in enumerate(episodes, start=1)]
    if episodes:
        mean, std, low, high, length = summary(episodes).values()
        lines.append(f"mean {mean:.2f}   std {std:.2f}   min {low:g}   max {high:g}   mean length {length:.1f}")
    if len(episodes) < asked:
        lines.append(f"only {len(episodes)} of {asked} episodes ended within --max-steps; the mean lacks the long ones")
    return "\n".join(lines)


def main() -> int:
    with user_errors():
        config = parse(EvaluateConfig, "evaluate", sys.argv[1:])
        if config.video:
            check_film(config.video_format)
        device = resolve_device(config.device)
        path = checkpoint.resolve(config.run)
        network, env_config, state = load_policy(path, device)
        act, kind = _act_of(state, network, device, config)
        env_config = whole_games(env_config, "gymnasium" if config.video else config.backend).resolved()
        max_steps = config.max_steps or _full_length(env_config) * -(-config.episodes // config.played_envs)
        folder = config.out or run_dir_of(path) / "evaluations"
        folder.mkdir(parents=True, exist_ok=True)
        envs = make_envs(env_config, config.played_envs, config.seed)
        if config.video:
            envs.reset()
            envs.render(0)  # an env that cannot draw is found now
    configure_torch(threads=1)  # batches are small: more threads would mostly wait for each other
    global_step = state.get("global_step", 0)
    print(f"checkpoint {path} (step {global_step:,}), {kind} actions on {device}")
    print(
        f"{config.episodes} episode(s) of {env_config.env_id}, {config.played_envs} env(s) ({env_config.backend}), "
        f"seed {config.seed}"
    )
    name = f"step_{global_step}_{kind}_seed_{config.seed}"
    with closing(envs), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "evaluation: only")  # the report says it
        if config.video:
            fps = 60 / env_config.frame_skip if env_config.atari_game else 30
            episodes = film(act, envs, config.episodes, max_steps, folder, name, config.video_format, fps)
        else:
            episodes = evaluate(act, envs, config.episodes, max_steps)
    print(report(episodes, config.episodes))
    if not episodes:
        raise RunFailed(f"no episode ended within {max_steps} steps: raise --max-steps")
    print(_write_results(folder / f"{name}.json", path, config, env_config, global_step, max_steps, episodes))
    return 0


def _act_of(state: dict[str, Any], network: nn.Module, device: torch.device, config: EvaluateConfig) -> tuple[Act, str]:
    """The policy of a checkpoint, and in a word how it chooses."""
    if state.get("algo") == "dqn":
        if config.greedy:
            raise ValueError("--greedy is for PPO: this is a checkpoint of DQN, which takes --epsilon")
        epsilon = state["config"]["eval_epsilon"] if config.epsilon is None else config.epsilon
        return q_act(network, device, epsilon, config.seed), f"epsilon_{epsilon:g}" if epsilon else "greedy"
    if config.epsilon is not None:
        raise ValueError("--epsilon is for DQN: this is a checkpoint of PPO, which takes --greedy")
    return policy_act(network, device, config.greedy, config.seed), "greedy" if config.greedy else "sampled"


def _full_length(config: EnvConfig) -> int:
    """Steps that the longest game takes, and one for the reset after it."""
    return -(-config.max_episode_frames // config.frame_skip) + 1 if config.max_episode_frames else 100_000


def _write_results(
    path: Path, source: Path, config: EvaluateConfig, env: EnvConfig, step: int, max_steps: int, episodes: list[Episode]
) -> Path:
    results = {
        "checkpoint": str(source),
        "global_step": step,
        "env_id": env.env_id,
        "backend": env.backend,
        "num_envs": config.played_envs,
        "seed": config.seed,
        "greedy": config.greedy,
        "max_steps": max_steps,
        "episodes_asked": config.episodes,
        **summary(episodes),
        "returns": [episode.return_ for episode in episodes],
        "lengths": [episode.length for episode in episodes],
    }
    with atomic_file(path) as file:
        file.write(json.dumps(results, indent=1).encode() + b"\n")
    return path


def _open_film(path: Path, fps: float) -> Any:
    import imageio.v2 as imageio

    if path.suffix == ".gif":
        return imageio.get_writer(path, duration=1000 / fps, loop=0)
    # 2: the codec needs even sides; the default of 16 would stretch the picture
    return imageio.get_writer(path, fps=fps, macro_block_size=2)


if __name__ == "__main__":
    sys.exit(run_cli(main))
