"""Reinforcement learning: Atari environments, episodes, the replay buffer."""
