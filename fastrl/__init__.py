"""fastrl: PPO and DQN for Atari in PyTorch, fast from a laptop to a GPU cluster."""

__version__ = "0.1.0"
