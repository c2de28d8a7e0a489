"""Reinforcement learning: Atari games, the replay buffer, episodes."""
