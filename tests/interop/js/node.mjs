// A js-libp2p node for Shoal's tests. One JSON line on standard output for each thing that happened.
//   node --import ./poly.mjs node.mjs dial ADDR    dial, ping, identify, echo 1 MiB through ADDR, leave
//   node --import ./poly.mjs node.mjs listen       listen, serve echo, until standard input ends
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const ECHO = '/shoal/interop/echo/1.0.0'
const MIB = 1024 * 1024
const say = (value) => process.stdout.write(JSON.stringify(value) + '\n')
const bytesOf = (chunk) => chunk instanceof Uint8Array ? chunk : chunk.subarray()

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), ping: ping() }
})

async function echo (stream) {
  for await (const chunk of stream) {
    if (!stream.send(chunk)) await stream.onDrain()
  }
  await stream.close()
}

async function receive (stream) {
  const chunks = []
  for await (const chunk of stream) chunks.push(Buffer.from(bytesOf(chunk)))
  return Buffer.concat(chunks)
}

async function dial (addr) {
  const identified = new Promise((resolve) => node.addEventListener('peer:identify', (e) => resolve(e.detail), { once: true }))
  const connection = await node.dial(multiaddr(addr))
  say({ connected: connection.remotePeer.toString() })
  say({ ping: await node.services.ping.ping(multiaddr(addr)) })
  const info = await identified
  say({ identify: { agent: info.agentVersion, protocols: info.protocols, observed: info.observedAddr?.toString(), listen: info.listenAddrs.map(String) } })
  const sent = Buffer.alloc(MIB, 'shoal')
  const stream = await connection.newStream(ECHO)
  const received = receive(stream)
  for (let at = 0; at < MIB; at += 16384) {
    if (!stream.send(sent.subarray(at, at + 16384))) await stream.onDrain()
  }
  await stream.close()
  say({ echo: sent.equals(await received) })
  await node.stop()
}

if (process.argv[2] === 'dial') {
  await dial(process.argv[3])
} else {
  await node.handle(ECHO, (stream) => { echo(stream) })
  say({ addr: node.getMultiaddrs()[0].toString() })
  process.stdin.resume()
  process.stdin.on('end', () => node.stop())
}
