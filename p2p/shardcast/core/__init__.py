"""SHARDCAST's decisions: pure by contract, events and time in, effects out.

Read `events` first, then `core`, which only says which part answers for which event. Each part
owns its own state; a part changes another's only by calling a method that says what happened.

- `statements`, per publisher: which manifests and rosters are trusted; who equivocated;
- `versions`: which versions are fetched and held, and by which patches;
- `peers`: which peers are connected, gone, banned, and bytes to and from each;
- `download`, per version: which chunks are here, asked for, late, held by others, and what is
  owed to others;
- `pace`: how long to wait, by how chunks have come;
- `repair`: what to ask of which holder, when to give up on it, and what to call off;
- `upload`: what to send to which peer (stripes, requests, credit), what is under way and waits
  on the bulk stream to each, what to tell neighbours, parents, subscribers and children, and
  what the uplink carries;
- `handout`: which of this node's own versions goes out and which is next; per version, which
  root gets which chunk, and what is given again;
- `receipts`: what peers report of roots and relays, and what is believed of their lines.

A chunk that comes: `core.offer` says whether it is wanted; `core._chunk_came` settles it with
its source (`Repair.arrived`), marks it verified (`Download.accept`), queues it for the
children (`Upload.relay`) and notes it for the next have-list (`Upload.note_new`). A late
one: the tick of `core._tick` makes it urgent (`Download.mark_late`), `Repair.pull` asks for it.

Transcripts of all this, as text: `tests/transcripts/shardcast`.
"""
