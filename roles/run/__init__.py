"""The run: what is trained, how, and by whose word.

The signed document is in the folder `core`; `draft` is the TOML table that its owner writes, in
which all that has a good default may be left out, and which may name a folder to pin.
``python -m roles.run`` is the owner's command line: a draft is read, completed and signed, and
a document is shown. A node calls `open_run`, a role `run_of`.
"""

from roles.run.core.file import Run, Terms, decode_run_untrusted, open_run, run_of, sign_run

__all__ = ["Run", "Terms", "decode_run_untrusted", "open_run", "run_of", "sign_run"]
