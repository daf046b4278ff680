// A js-libp2p node for Shoal's tests. One JSON line on standard output for each thing that happened.
//   node --import ./poly.mjs node.mjs dial ADDR    dial, ping, identify, echo 1 MiB through ADDR, leave
//   node --import ./poly.mjs node.mjs circuit ADDR dial ADDR behind a relay, echo, say when it is direct
//   node --import ./poly.mjs node.mjs asks ADDR... dial all, say when they have confirmed an address of ours
//   node --import ./poly.mjs node.mjs listen       listen, serve echo and AutoNAT, until standard input ends
//   node --import ./poly.mjs node.mjs reserve ADDR the same behind the relay at ADDR
//   node --import ./poly.mjs node.mjs relay        the same, and relay
//   node --import ./poly.mjs node.mjs lan          the same, and tell of each peer found by mDNS
// LISTEN is the address to listen at, instead of loopback.
import { autoNATv2 } from '@libp2p/autonat-v2'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { dcutr } from '@libp2p/dcutr'
import { mdns } from '@libp2p/mdns'
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

const [mode, ...args] = process.argv.slice(2)
const place = process.env.LISTEN ?? '/ip4/127.0.0.1/tcp/0'
const LIMITED = { runOnLimitedConnection: true }

const node = await createLibp2p({
  addresses: { listen: mode === 'reserve' ? [place, args[0] + '/p2p-circuit'] : [place] },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  peerDiscovery: mode === 'lan' ? [mdns({ interval: 1000 })] : [],
  services: {
    identify: identify(),
    ping: ping(),
    dcutr: dcutr(),
    autonat: autoNATv2(),
    ...(mode === 'relay' ? { relay: circuitRelayServer() } : {})
  }
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

async function circuit (addr) {
  const connection = await node.dial(multiaddr(addr))
  const direct = new Promise((resolve) => node.addEventListener('connection:open', (e) => {
    if (e.detail.limits == null && e.detail.remotePeer.equals(connection.remotePeer)) resolve()
  }))
  const sent = Buffer.alloc(16000, 'shoal')
  const stream = await connection.newStream(ECHO, LIMITED)
  const received = receive(stream)
  stream.send(sent)
  await stream.close()
  say({ echo: sent.equals(await received), limited: connection.limits != null })
  await direct
  say({ direct: true })
}

async function asks (addrs) {
  const isConfirmed = () => node.getMultiaddrs().some((addr) => addr.toString().startsWith(place))
  const confirmed = new Promise((resolve) => node.addEventListener('self:peer:update', () => { if (isConfirmed()) resolve() }))
  say({ before: isConfirmed() })
  for (const addr of addrs) await node.dial(multiaddr(addr))
  await confirmed
  say({ confirmed: true })
}

async function behind () {
  const isThere = () => node.getMultiaddrs().find((addr) => addr.toString().includes('p2p-circuit'))
  while (isThere() == null) await new Promise((resolve) => setTimeout(resolve, 50))
  return isThere()
}

if (mode === 'dial') {
  await dial(args[0])
} else if (mode === 'circuit') {
  await circuit(args[0])
} else if (mode === 'asks') {
  await asks(args)
} else {
  await node.handle(ECHO, (stream) => { echo(stream) }, LIMITED)
  if (mode === 'lan') node.addEventListener('peer:discovery', (e) => say({ found: e.detail.id.toString(), at: e.detail.multiaddrs.map(String) }))
  say({ addr: (mode === 'reserve' ? await behind() : node.getMultiaddrs()[0] ?? `${place}/p2p/${node.peerId}`).toString() })
  process.stdin.resume()
  process.stdin.on('end', () => node.stop())
}
