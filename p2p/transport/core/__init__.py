"""The pure half of the transport: bytes and time in, bytes and events out; no I/O, by contract.

On the way from raw bytes to streams:

* `negotiate`: multistream-select, by which two sides agree on what is spoken next;
* `noise`: the handshake that proves who is there, and the sealed records after it, sealed
  by `cipher` (ChaCha20-Poly1305);
* `yamux`: `Mux`, many streams over one;
* `budget`: what all peers together may make this host hold, and how much is sealed and given to
  the kernel at a time.

Read `yamux` first. Each machine takes bytes by `receive_data`; what must go out comes from
`data_to_send`, or, after the handshake, from `NoiseSession.seal`. `Mux.receive_data` returns
events. `tests/transcripts/yamux/` shows `Mux` frame by frame.
"""
