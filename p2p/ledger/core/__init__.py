"""The ledger without its disk: entries, segments and marks as pure functions of bytes."""
