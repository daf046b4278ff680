"""``shoal node``: the command line of a node."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import trio

from p2p.concurrency import leaves
from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.host import Host
from p2p.identity import verify
from p2p.machine import KEY, load_or_create_key, open_world, raise_descriptor_limit
from p2p.membership.heartbeat import MAX_NAME
from p2p.node.admission import PREFIX, SignedRun, decode_invite_untrusted
from p2p.node.config import NodeConfig, load_config
from p2p.node.dashboard.server import open_dashboard
from p2p.node.folders import STARTED, add_folder, node_of
from p2p.node.node import Node, open_node, run_roles
from p2p.node.plugins import NO_ROLE, load_roles, open_run_untrusted
from p2p.node.process import (
    check_key_place,
    check_platform,
    locked_folder,
    logging_to,
    until_told_to_end,
)
from p2p.node.role import Role
from p2p.node.rundoc import MAX_DOCUMENT, PATH
from p2p.node.screen import ENDED, Terminal, report_progress
from p2p.node.usage import (
    DATA,
    FAILED,
    CommandParser,
    bootstrap_addr,
    complain,
    expanded,
    host_port,
    interruptible,
    multiaddr,
    say,
    seconds,
    tell,
)
from p2p.node.wiring import is_member, relay_offers, seek_relays
from p2p.reach.lan import Lan, open_lan
from p2p.reach.nat import open_nat
from p2p.sandbox import Containment
from p2p.swarm.core.limits import LOOPBACK, PRIVATE, reach_of
from p2p.swarm.swarm import open_host


def node_main(argv: Sequence[str] | None = None) -> int:
    """Run a node: relay policies, and work in the roles that it is given."""
    return interruptible(partial(_node, argv))


def key_main(argv: Sequence[str] | None = None) -> int:
    """Print the id of a node by its folder, and make its key if need be."""
    parser = CommandParser(prog="shoal key", description=key_main.__doc__)
    add_folder(parser)

    def run() -> int:
        options = parser.parse_args(argv)
        path = node_of(options) / KEY
        check_key_place(path)
        say(str(load_or_create_key(path).peer_id))
        return 0

    return interruptible(run)


def _node(argv: Sequence[str] | None) -> int:
    options = _parse(argv)
    check_platform()
    config = _configure(options)
    document = None if options.run is None else _read_document(options.run)
    roles = load_roles(options.role, config.role, device=options.device)
    check_key_place(options.data / KEY)
    failures: list[BaseException] = []
    try:
        trio.run(_run_node, options, config, document, roles)
    except* ShoalError as group:
        failures.extend(leaves(group))
    for message in dict.fromkeys(str(failure) for failure in failures):
        complain(message)
    return FAILED if failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal node",
        description=(
            "Run a node: it joins a run, relays policies, and does the jobs that its roles say."
        ),
        epilog="Everything else is in the TOML file (docs/node.md).",
    )
    add = parser.add_argument
    # fmt: off
    add("--role", action="append", metavar="NAME",
        help="a job (several are possible); none only relays")
    add("--run", type=Path, metavar="FILE",
        help="signed run file; without it a bootstrap peer hands it over")
    add("--bootstrap", action="append", type=bootstrap_addr, metavar="ADDR", default=[],
        help="a member: /ip4/../tcp/../p2p/..")
    add("--lan", action="store_true",
        help="find members in the local network, and be found there (mDNS)")
    add("--listen", action="append", type=multiaddr, metavar="ADDR", default=[],
        help="default /ip4/0.0.0.0/tcp/0")
    add("--data", type=Path, metavar="DIR", default=DATA,
        help="key, policies, ledger and log; default ~/.shoal")
    add("--trust-environments", action="store_true",
        help="run environments even where nothing contains their processes")
    add("--accept-capsules", action="store_true",
        help="run environments that come with the run, as wasm that reaches nothing here")
    add("--config", type=Path, metavar="TOML", help="configuration file")
    add("--device", metavar="NAME",
        help="what the roles compute on: auto (the default), cpu, cuda, cuda:N or mps")
    add("--log", choices=("debug", "info", "warning", "error"), default="info",
        help="level of DIR/log")
    add("--log-format", choices=("text", "json"), default="text",
        help="of DIR/log (docs/events.md)")
    add("--json", action="store_true", help="JSON lines instead of text")
    add("--status", type=seconds, metavar="SECONDS",
        help="print the node's health, a JSON line, that often; implies --json")
    add("--dashboard", type=host_port, metavar="HOST:PORT",
        help="show a page there, such as 127.0.0.1:8080; elsewhere it asks for a token")
    add("--invite", type=_invite, metavar="TEXT|FILE",
        help="an invite to the run, or the file that holds it; needed at the first start only")
    add("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
    # fmt: on
    options = parser.parse_args(argv)
    options.role = tuple(options.role or (NO_ROLE,))
    options.invite = options.invite or ""  # argparse would read a default that is text
    options.data = expanded(options.data)
    options.json = options.json or options.status is not None
    words = sys.argv[1:] if argv is None else argv
    options.typed = f"shoal {shlex.join(['node', *words])}"
    if options.die_with_parent:
        options.typed = f"shoal run start {options.data.parent}"
    return options


def _invite(value: str) -> str:
    """Return the text of an invite, which is given directly or as a file."""
    try:
        if not value.startswith(PREFIX):
            with expanded(Path(value)).open(encoding="utf-8-sig") as file:
                value = file.read(4096)  # more than an invite has
        decode_invite_untrusted(value)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise argparse.ArgumentTypeError(
            f"{value[:80]!r} is neither an invite nor a file that can be read: {why}"
        ) from None
    except BadMessage as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value.strip()


async def _run_node(
    options: argparse.Namespace, config: NodeConfig, document: bytes | None, roles: list[Role]
) -> None:
    raise_descriptor_limit()
    terminal = Terminal()
    with (
        locked_folder(options.data),
        logging_to(options.data / "log", options.log, terminal.above, options.log_format),
    ):
        async with (
            until_told_to_end(with_parent=options.die_with_parent),
            open_world(options.data, trims=True) as world,
            open_host(world=world, listen=config.places, config=config.host) as host,
            open_dashboard(world, host, roles, options.data, options.dashboard) as shown,
            AsyncExitStack() as stack,
        ):
            (options.data / STARTED).touch(0o600)  # it may hold an invite
            (options.data / STARTED).write_text(options.typed, encoding="utf-8")
            own, url = shown
            has_run = document is not None or (options.data / PATH).exists()
            containment = await world.containment()
            asking = "looking for members of a run in the local network" if options.lan else ""
            asking = "asking the bootstrap peers for the run" if config.bootstrap else asking
            lan = await stack.enter_async_context(open_lan(host)) if options.lan else None
            _report_start(options, host, containment, url, has_run=has_run, asking=asking)
            joined = False
            nodes: list[Node] = []
            try:
                nat = await stack.enter_async_context(
                    open_nat(
                        host,
                        world.signer,
                        config.nat,
                        named=config.relays,
                        is_member=partial(is_member, nodes),
                        offers=partial(relay_offers, nodes),
                        seek=partial(seek_relays, nodes),
                    )
                )
                if not has_run and not asking:
                    await trio.sleep_forever()
                nearby = tuple if lan is None else lan.some
                async with open_node(
                    world, host, config, document=document, nearby=nearby, nat=nat
                ) as node:
                    joined = True
                    nodes.append(node)
                    with suppress(PackageNotFoundError):  # a checkout that is not installed
                        node.membership.me.update(version=version("shoal")[:MAX_NAME])
                    _report_run(options, node.run, host, has_run=has_run)
                    own.node = node
                    async with trio.open_nursery() as nursery:
                        if lan is not None:
                            nursery.start_soon(_meet_neighbours, node, lan)
                        if options.status is not None:
                            nursery.start_soon(
                                _report_health, node, roles, max(options.status, 0.05)
                            )
                        elif not options.json:
                            nursery.start_soon(report_progress, node, roles, terminal)
                        await run_roles(node, roles)
            except trio.Cancelled:
                if not joined and not options.json:
                    terminal.say(f"ended    no run was joined; {ENDED}")
                raise


def _configure(options: argparse.Namespace) -> NodeConfig:
    config = NodeConfig() if options.config is None else load_config(options.config)
    try:
        return replace(
            config,
            listen=tuple(options.listen) or config.listen,
            bootstrap=tuple(options.bootstrap) or config.bootstrap,
            trust_environments=options.trust_environments or config.trust_environments,
            accept_capsules=options.accept_capsules or config.accept_capsules,
            run=replace(config.run, invite=options.invite or config.run.invite),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read_document(path: Path) -> bytes:
    """Read the run file, which an installed reader must accept.

    Raises:
        ConfigError: The file cannot be read or used.
    """
    try:
        with path.open("rb") as file:
            document = file.read(MAX_DOCUMENT + 1)
        open_run_untrusted(document, verify)
    except OSError as error:
        raise ConfigError(f"the run file {path} cannot be read: {error.strerror}") from None
    except BadMessage as error:
        raise ConfigError(f"the run file {path} cannot be used: {error}") from None
    return document


def _report_start(
    options: argparse.Namespace, host: Host, containment: Containment, url: str, *,
    has_run: bool, asking: str,
) -> None:  # fmt: skip
    addrs = [str(addr) for addr in host.addrs]
    no_run = "no run yet: start again with --bootstrap ADDR of a member, or with --run FILE"
    if options.json:
        fields = {
            "peer": str(host.peer_id), "addrs": addrs, "roles": options.role,
            "data": str(options.data), "sandbox": containment.mechanism.value,
            **({"dashboard": url} if url else {}),
            **({} if has_run else {"waits_for": asking or no_run}),
        }  # fmt: skip
        tell(json.dumps({"event": "started", **fields}))
        return
    lines = [f"node     {host.peer_id}", *(f"address  {addr}" for addr in addrs)]
    lines += [f"roles    {', '.join(options.role)}", f"data     {options.data}"]
    lines.append(f"sandbox  {containment}")
    lines += [f"page     {url}"] if url else []
    if asking and not has_run:
        lines.append(f"next     {asking}; nothing to do")
    elif not has_run:
        lines.append(f"next     {no_run}")
        lines.append("         (a run of your own: docs/runs.md)")
    tell("\n".join(lines))


def _report_run(
    options: argparse.Namespace, run: SignedRun, host: Host, *, has_run: bool
) -> None:
    if options.json:
        fields = {"run": run.id.hex(), "name": run.name, "owner": str(run.owner),
                  "epoch": run.epoch}  # fmt: skip
        tell(json.dumps({"event": "joined", **fields}))
        return
    lines = [
        f"run      {run.name}, id {run.id.hex()[:16]}, epoch {run.epoch}",
        f"owner    {run.owner}",
    ]
    if has_run and not host.addrs:
        lines.append("next     this node listens nowhere: others cannot join through it")
    elif has_run:
        best, (role, who) = max(host.addrs, key=reach_of), run.joins_as
        lines.append(f"next     others join with: shoal node --role {role} --bootstrap {best}")
        reach = {
            LOOPBACK: "only this machine can dial that: for others, --listen at an address that"
            " they reach",
            PRIVATE: "only this network can dial that: for others, forward a port and announce"
            " it, docs/node.md",
        }.get(reach_of(best))
        lines += [f"         ({note})" for note in (who, reach) if note]
    tell("\n".join(lines))


async def _meet_neighbours(node: Node, lan: Lan) -> None:
    """Join through peers in the local network whenever this node knows no other member."""
    while True:
        if lan.found and not node.membership.neighbours:
            await node.membership.join(lan.some())
        await lan.news.wait()


async def _report_health(node: Node, roles: Sequence[Role], interval: float) -> None:
    due = node.world.now()
    while True:
        line = json.dumps(node.health(roles), default=str)
        # In a thread: a parent that does not read must not stop the node.
        await trio.to_thread.run_sync(tell, line, abandon_on_cancel=True)
        due += interval
        await node.world.sleep_until(due)
