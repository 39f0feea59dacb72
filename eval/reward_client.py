"""Scores from reward servers."""


class RewardServersDown(RuntimeError):
    """No server of a reward answers; the scripts save a checkpoint and stop."""
