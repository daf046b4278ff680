"""The run: what is trained, how, and by whose word.

All of it is in the folder `core`: the signed `file`, and the `draft` that its owner writes.
``python -m roles.run`` is the owner's command line: a draft is read, completed and signed, and
a document is shown. A node calls `open_run`, a role `run_of`.
"""

from roles.run.core.file import Run, Terms, decode_run_untrusted, open_run, run_of, sign_run

__all__ = ["Run", "Terms", "decode_run_untrusted", "open_run", "run_of", "sign_run"]
