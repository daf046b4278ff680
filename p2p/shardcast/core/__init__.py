"""SHARDCAST's decisions: pure by contract, events and time in, effects out.

Read `events` first, then `core`, which only says which part answers for which event. Each part
owns its own state; a part changes another's only by calling a method that says what happened.

================= ================================================================= ========
file              what it decides                                                   per
================= ================================================================= ========
`statements`      which manifests and rosters are trusted; who contradicted itself  trainer
`versions`        which versions are fetched and held, and by which patches         node
`peers`           which peers are connected, gone, banned                           peer
`download`        which chunks are here, asked for, late; made of:                  version
  `chunks`        the life of a chunk, as a table
  `availability`  what other peers hold and have taken
  `lateness`      when a missing chunk becomes urgent
  `pace`          how long to wait, by how chunks have come
  `patience`      how long to wait for something, by how long it usually takes
`repair`          what to ask other peers, and which need not send any more         node
`sources`         which holder to ask for which chunk, and when to give up on it    peer
`announcer`       what to tell neighbours, parents, subscribers and children        version
`receipts`        what each stripe brought, told to the origin and judged there     version
`upload`          what to send to which peer: stripes, requests, credit; made of:   node
  `queue`         the bulk stream to one peer: what is under way, what waits        peer
  `line`          rate and round trip, and so how much may be on the way            peer
  `allowance`     how much a peer gets for asking                                   version
  `uplink`        what our own uplink carries, measured while it is busy            node
`flows`           bytes to and from each peer, counted for people                   peer
`origin`          which of this node's own versions goes out, and which is next     node
  `handout`       which root gets which chunk, and what is given again; made of:    version
    `gifts`       the life of a chunk of a hand-out, as a table
    `root`        what one root was given, and how fast it confirms                 peer
  `demotion`      which root loses its stripe, since its children report it         version
  `capacity`      what a peer is believed to upload                                 peer
================= ================================================================= ========

A chunk that comes: `core._chunk_came` settles it with its source (`sources.arrived`), marks it
verified (`download.accept`), queues it for the children (`upload.relay`) and notes it for the
next have-list (`announcer.note_new`). A late one: the tick of `core._tick` makes it urgent
(`download.mark_late`), `repair.pull` asks for it.

Transcripts of all this, as text: `tests/transcripts/shardcast`.
"""
