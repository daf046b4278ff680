"""The meanings of metrics, and the result of a run in a sentence, for people who read a report.

Each metric of which a scenario expects something is here, and a few that stand beside them.
"""

from __future__ import annotations

from string import Formatter
from typing import Final

from sim.run.result import Result

MEANINGS: Final = {
    # Membership
    "alive": "Nodes that live at the end.",
    "bytes_per_second": "What a node sends on average, headers included.",
    "coverage": "Of the living members, the share that a node lists, on average over nodes that"
    " have been there for a while.",
    "death_seconds_median": "From a death until a node that had the dead in view knows of it.",
    "death_seconds_p99": "From a death until 99 of 100 nodes that had the dead in view know of"
    " it.",
    "deaths": "Machines that died.",
    "deaths_known_share": "Of all pairs of a dead peer and a node that had it in view, the"
    " share in which the node knew within 15 s.",
    "ghost_share": "Of the members that nodes list, the share that is dead.",
    "join_seconds_median": "From a node's start until it was a member.",
    "returns_by_day": "Of the machines that came back, the share that did by day.",
    "views_of_deaths": "Pairs of a dead peer and a node that had it in view.",
    # Hostile members
    "dead_in_mesh_most": "The largest share of a node's mesh that was gone.",
    "honest_coverage": "Of the honest members, the share that honest nodes list under attack.",
    "honest_in_key_least": "Honest publishers that a newcomer reads under the run's key, at"
    " least.",
    "honest_neighbours_least": "Honest neighbours of the honest node that has the fewest.",
    "honest_seen_least": "Of what the worst newcomer sees, the share that is honest.",
    "honest_share_least": "Of the members that an honest node lists, the share that is honest,"
    " at least.",
    "officers_in_key_least": "The fewest officers that a newcomer reads under the run's key.",
    "officers_located_least": "The fewest officers of the run that a newcomer finds an"
    " address of.",
    "reached_least": "Of the nodes, the share that the least heard publication reached.",
    "reached_mean": "Of the nodes, the share that a publication reached.",
    "traffic_ratio": "What honest nodes send under attack, for each byte in peace.",
    # Weights
    "arrived_share": "Of all pairs of a policy and a node that was there, the share in"
    " which it became whole.",
    "chunks_bad": "Chunks that were not what the manifest says.",
    "completed": "Of the living nodes, the share that became whole.",
    "from_peers_share": "Of the bytes of policies that came, the share that other receivers"
    " sent.",
    "got_share": "Of all pairs of a policy and a site, the share in which it came.",
    "hold_newest": "Of the nodes that should have it, the share that holds the newest policy.",
    "in_view": "Other nodes that the pusher knows of.",
    "join_seconds_100": "From joining until the last of the latecomers held the newest policy.",
    "origin_policies_sent": "What the origin sent, in policies, for each that it published.",
    "origin_policies_since_join": "What the origin sent after latecomers joined, in policies.",
    "reserved_share": "Reservations of the nodes that nobody can dial, at relays that live, as"
    " a share of the two that each wants.",
    "direct_share": "Of the connections, the share that needs no relay.",
    "seconds_50": "From publication until half of the nodes held it.",
    "seconds_100": "From publication until the last node held it.",
    "seconds_mean": "From publication until a site held it, on average.",
    "times_bound_99": "Time until 99 % held it, in terms of the least that lines allow.",
    "whole": "Nodes that have the files whole.",
    # Roles
    "broadcast_missed_share": "Of all pairs of a policy and a volunteer, the share in which"
    " it never came.",
    "cheater_accepted": "Submissions of the cheater that were accepted.",
    "cheater_submitted": "Submissions of the cheater.",
    "commitment_bytes": "What commitments cost the network for each place.",
    "done": "1 if the run has all its steps.",
    "drawn_share": "Of the places of known workers, the share that a lot had checked.",
    "honest_rejected": "Submissions of honest workers that were rejected.",
    "leaf_share_from_peers": "Of the bytes of policies that receivers got, the share that came"
    " from each other.",
    "rollouts_lost_share": "Of the rollouts that were begun, the share that nobody could use.",
    "rollouts_rejected": "Rollouts that validators rejected.",
    "stale_share": "Of the rollouts, the share without a verdict: most came too late.",
    "staleness_max": "Steps by which the oldest rollout learnt from was behind.",
    "steps": "Optimiser steps that were done.",
    "tables_growing": "Tables in a node's memory that grow without a limit.",
    "volunteers_generating": "Of the volunteers' time, the share in which they generate.",
    # DiLoCo
    "global_seconds": "Time of an exchange among sites all over the world.",
    "global_utilised": "Of the time of the worst site, the share in which it computes.",
    "loss": "Training loss at the end, of the worst honest site.",
    "members_end": "Members of the last round.",
    "most_spike": "The largest rise of the loss from one round to the next.",
    "moved": "The most that a hostile site's update counted in a mean, in usual updates.",
    "named_by_round": "Round by which each honest site had convicted the hostile ones.",
    "replicas_differ": "Rounds after which honest sites did not hold the same weights.",
    "rounds": "Rounds that the slowest honest site has done.",
    "unnamed": "Hostile sites that sign a lie, and that an honest site has not convicted.",
    "usa_europe_seconds": "Time of an exchange among sites in Europe and the United States.",
    "usa_europe_utilised": "Of the time of the worst site, the share in which it computes.",
    "usa_seconds": "Time of an exchange among sites in the United States.",
    "usa_utilised": "Of the time of the worst site, the share in which it computes.",
    "wrongly_named": "Honest sites that an honest site has convicted.",
}

SENTENCES: Final = (
    "{alive} of {nodes} nodes live; a death is known to 99 % after {death_seconds_p99:.0f} s",
    "{alive} of {nodes} nodes live, and no death was there to know of",
    "{hold_newest:.0%} of the nodes hold the newest policy, the last after {seconds_100:.1f} s",
    "{hold_newest:.0%} of the nodes hold the newest policy",
    "{got_share:.1%} of all policies arrived, half of them after {seconds_50:,.0f} s",
    "{got_share:.1%} of all policies arrived",
    "{completed:.1%} of the living nodes became whole",
    "{steps} steps learnt; of the cheater's {cheater_submitted} submissions {cheater_accepted}"
    " were accepted",
    "{volunteers_generating:.0%} of the volunteers' time generates rollouts, of which"
    " {rollouts_lost_share:.1%} are lost",
    "{members_end} members after {rounds} rounds; replicas differed after {replicas_differ}",
    "{global_utilised:.0%} of the time of the worst site computes, all over the world",
    "The worst off honest node still lists {honest_share_least:.0%} honest members",
    "A publication reaches {reached_mean:.0%} of the nodes, {reached_least:.0%} at worst",
    "A node lists {coverage:.1%} of the living members",
    "{tables_growing} tables of a node grow without a limit",
)
"""Headlines of runs. A run gets the first sentence whose metrics it has."""


def in_a_sentence(result: Result) -> str:
    """Return the outcome of a run in a sentence."""
    known = {"nodes": result.nodes, **result.metrics}
    if not known.get("views_of_deaths", 1):
        known.pop("death_seconds_p99", None)
    for sentence in SENTENCES:
        names = [name for _, name, _, _ in Formatter().parse(sentence) if name]
        if all(isinstance(known.get(name), int | float) for name in names):
            return sentence.format_map(known)
    return f"{result.nodes:,} nodes for {result.virtual_seconds:,.0f} virtual seconds"
