// js-libp2p wants Node 22. These are what Node 20 lacks.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((yes, no) => { resolve = yes; reject = no })
  return { promise, resolve, reject }
}
