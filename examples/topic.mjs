// The same topic in JavaScript: node topic.mjs ADDRESS
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { gossipsub } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const TOPIC = '/example/weather/1'

const node = await createLibp2p({
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), pubsub: gossipsub() }
})
const { pubsub } = node.services
pubsub.addEventListener('message', ({ detail }) => {
  console.log(`${detail.from} says ${new TextDecoder().decode(detail.data)}`)
})
pubsub.subscribe(TOPIC)
await node.dial(multiaddr(process.argv[2]))
setInterval(() => {
  pubsub.publish(TOPIC, new TextEncoder().encode('rain, says js')).catch((error) => console.log(error.message))
}, 1000)
