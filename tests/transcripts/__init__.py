"""Protocols as transcripts, in the manner of etcd/raft's testdata: events in, effects out, state after.

Each file ``tests/transcripts/<protocol>/*.txt`` is a conversation with one core, on virtual time, that a
stranger can read before the code. `test_transcripts` plays all of them, and
``python -m tests.transcripts --write`` writes what came out. The format is in `engine`, the words
of each protocol in `players`.
"""
