"""The trainer: learns from accepted rollouts and publishes policies."""

from roles.trainer.session import Trainer, TrainerConfig

__all__ = ["Trainer", "TrainerConfig"]
