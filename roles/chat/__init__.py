"""Uses of a trained model by a person: talk to it, sample it, measure it.

`find` looks for the model in the folder of a run, of a node, of an export, or in Hugging Face's
layout; `voice` opens it and draws from it, token by token; `command` is ``shoal chat`` and
``shoal sample``; `evaluate` is ``shoal eval``; `harness` lets lm-eval ask. All compute in this
process, with torch: what is opened was trained on this machine, or checked when it was pulled.
Tokenizers are tried in a process of their own first (`roles.models.trial`), and environments
run in theirs.
"""

from roles.chat.command import chat, sample
from roles.chat.evaluate import main as evaluate

__all__ = ["chat", "evaluate", "sample"]
