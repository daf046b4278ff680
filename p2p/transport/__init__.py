"""libp2p's wire (Noise, yamux, multistream-select): machines without I/O, and trio drivers.

The files, in the order in which to read them
---------------------------------------------
The folder `core` decides: negotiation, handshake, records, Yamux and the memory that peers may
take are machines without I/O, with a map of their own.

Drivers, ordinary trio code: `connection` carries one secured connection (one task reads, one
writes), its streams, and `secure`, which makes its session of a raw stream; it also has what
tasks wait for: an event that can be used again, and turns at costly work, one piece in each
pass of the scheduler.
`dial` tries the addresses of one peer, staggered; `dns` finds those behind a ``/dnsaddr``.

Raw bytes: `tcp` and `memory` are two of the three `p2p.network.Network`; the simulator's is the
third.

How data flows
--------------
::

    in:   TcpStream -> NoiseSession.receive_data -> Mux.receive_data -> events -> MuxedStream
    out:  MuxedStream -> Mux.send -> Connection.flush; its writer: Mux.data_to_send
                                                     -> NoiseSession.seal_into -> TcpStream

Nothing here is called by services: a newcomer opens a host (`p2p.swarm`), whose `connector`
dials and accepts. Tests that want one connection call `secure` on each end of a `memory_pair`,
and `Connection.run`.
"""
