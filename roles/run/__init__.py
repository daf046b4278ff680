"""The run: its signed `file`, and the `draft` that its owner writes."""

from roles.run.file import Run, Terms, decode_run_untrusted, open_run, run_of, sign_run

__all__ = ["Run", "Terms", "decode_run_untrusted", "open_run", "run_of", "sign_run"]
