"""Hand over a file: `python drop.py give FILE`, there `python drop.py take ADDRESS FILE`."""

import hashlib
import sys
from pathlib import Path

import trio

import p2p

DROP = "/example/drop/1.0.0"
PIECE = 64 * 1024


async def give(path):
    async def send(stream):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                await p2p.send_frame(stream, piece)
        await p2p.send_frame(
            stream, b"sha256:" + digest.digest()
        )  # shorter than a piece, and last

    async with p2p.open_host() as host:
        with host.serving(DROP, send):
            print("python drop.py take", host.addrs[0], path.name, flush=True)
            await trio.sleep_forever()


async def take(addr, path):
    async with p2p.open_host() as host:
        peer = await host.connect_addr(addr)
        digest, last = hashlib.sha256(), None
        async with await host.open_stream(peer, DROP) as stream:
            await stream.send_eof()
            frames = p2p.FrameReader(stream, PIECE)
            with path.with_suffix(".part").open("wb") as file:
                while (frame := await frames.receive()) is not None:
                    if last is not None:
                        file.write(last)
                        digest.update(last)
                    last = frame
        if last != b"sha256:" + digest.digest():
            sys.exit("the file was cut off on its way: take it again")
        path.with_suffix(".part").rename(path)
        print(f"{path} from {peer}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["give", path]:
                trio.run(give, Path(path))
            case ["take", addr, path]:
                trio.run(take, addr, Path(path))
            case _:
                sys.exit(__doc__)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same line begins again")
