"""The ledger without its disk: entries, segments, marks. Pure: bytes in, values out."""
