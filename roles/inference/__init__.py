"""The inference role: draws rollouts and submits them."""

from roles.inference.session import Inference, InferenceConfig

__all__ = ["Inference", "InferenceConfig"]
