"""Membership's decisions: pure by contract, events and time in, effects out.

Read `events` first, then `core`, which says which part answers for which event. Each part owns
its own state.

================== ================================================================ ==========
file               what it decides                                                  per
================== ================================================================ ==========
`local_heartbeat`  what this node says of itself, when, and to which peers          node
`verifier`         whether to believe a heartbeat; penalties; the wall clock        peer
`member_list`      which members are kept, named to others, evicted                 node
`active_view`      which members are neighbours (HyParView)                         node
`failure_detector` probe, suspect, confirm: who is dead (SWIM)                      peer
`dissemination`    which statements are passed on, to which neighbours, and when    statement
`pull`             which heartbeats to ask for, of those that digests name          node
`quotas`           how much one peer may make us pass on or answer                  peer
================== ================================================================ ==========

A suspected peer is declared dead by `failure_detector._confirm_death`. An arriving heartbeat
goes through `core._accept`; its author may then be asked to become a neighbour
(`active_view.fill`).

Transcripts of all this, as text: `tests/transcripts/membership`.
"""
