"""Names, before anything else is imported, a package that Shoal needs and this Python lacks."""

import importlib.util
import sys

for _needed in ("trio", "nacl", "msgpack", "zstandard", "blake3", "numpy"):
    if importlib.util.find_spec(_needed) is None:
        _remedy = (
            f"Shoal needs the package {_needed}, which this Python lacks: install Shoal"
            " again, with pip install . in its checkout or from its wheel"
        )
        if sys.argv[:1] == ["-m"]:  # python -m p2p.node: a sentence, and no traceback
            raise SystemExit(_remedy)
        raise ModuleNotFoundError(_remedy, name=_needed)
