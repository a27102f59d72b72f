"""fastrl: PPO and DQN for Atari in PyTorch, fast from a laptop to a GPU cluster."""

from pkgutil import extend_path

__version__ = "0.1.0"

# In a checkout, `python -m` finds the Python files here first; the compiled `_native` lies in the installed package.
__path__ = extend_path(__path__, __name__)
