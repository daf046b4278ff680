"use strict";
// The page's state, and how each part is drawn from it. Whatever strangers said comes as a JSON
// string and goes out by textContent inside a <bdi>: no markup, and no direction that leaks.

const MOST_ROWS = 60; // of the table of peers: more would be searched, not read
const MOST_KINDS = 6; // of roles, policies, versions that are counted apart
const SILENT = 5000; // milliseconds without a word after which the page says so

const state = {picture: null, panels: [], curves: {}, at: 0, heard: 0};
const plots = new Map();
const map = new Map_(byId("map-drawing"));
const embedded = byId("data"); // of a report
let drawing = false;

function nameOf(peer) {
  const row = state.picture.peers[peer];
  if (row && row.name) return clean(row.name);
  return shortened(peer);
}

function shortened(peer) {
  return peer.length > 14 ? peer.slice(0, 5) + "…" + peer.slice(-4) : peer;
}

// What the node tells.

function take(told) {
  const isNew = JSON.stringify(told.panels) !== JSON.stringify(state.panels);
  Object.assign(state, told); // curves are there if they have changed
  state.began = told.wall - told.at; // wall clock of second 0
  if (isNew) {
    plots.clear();
    for (const place of ["curves", "counts", "figures", "panels"]) byId(place).replaceChildren();
  }
  map.note(state.picture.flows);
  redraw();
}

// Drawn at most once a frame, whatever comes.
function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; draw(); });
}

function draw() {
  const picture = state.picture;
  document.title = clean(picture.title) + " · Shoal";
  byId("title").replaceChildren(said(picture.title));
  byId("says").replaceChildren(said(picture.says));
  const byPanel = panelsWithData();
  drawTiles(byPanel);
  drawCurves(byPanel.filter((one) => one.panel.kind === "curve"));
  drawPanels(byId("counts"), byPanel.filter((one) => one.panel.kind === "counts").reverse());
  drawPanels(byId("figures"), byPanel.filter((one) => one.panel.kind === "figures"));
  drawPanels(byId("panels"), byPanel.filter((one) => BELOW.includes(one.panel.kind)).sort((a, b) => BELOW.indexOf(a.panel.kind) - BELOW.indexOf(b.panel.kind)));
  byId("map").hidden = Boolean(embedded) && Object.keys(picture.peers).length < 2; // of what one trainer has left
  byId("map-words").textContent = map.draw(picture, nameOf, openPeer);
  drawPeers();
  drawPeer();
  drawFacts();
}

// Each panel of which something is there, with its nodes: [{panel, nodes: [[peer, value], ...]}].
function panelsWithData() {
  return state.panels.map((panel) => {
    const role = state.picture.roles[panel.role] || {};
    const nodes = Object.entries(role).filter(([, shown]) => panel.number in shown).map(([peer, shown]) => [peer, shown[panel.number]]);
    return {panel, key: panel.role + " " + panel.number, nodes};
  });
}

function drawTiles(byPanel) {
  const peers = Object.values(state.picture.peers).filter((row) => row.state !== "gone");
  const newest = Math.max(-1, ...peers.map((row) => row.policy ?? -1));
  const tiles = embedded && peers.length < 2 ? [] : [["peers alive", peers.length]];
  if (newest >= 0) tiles.push(["newest policy", newest]);
  for (const {panel, nodes} of byPanel) {
    panel.values.forEach((value, place) => {
      if (!value.lead || panel.kind !== "figures") return;
      const found = nodes.map(([, shown]) => shown[place]).filter((one) => typeof one === "number");
      if (!found.length || tiles.some(([label]) => label === value.label)) return;
      if (value.counts) tiles.push([value.label, number(found.reduce((a, b) => a + b, 0), value.unit)]);
      else if (found.every((one) => one === found[0])) tiles.push([value.label, number(found[0], value.unit)]);
    });
  }
  byId("tiles").replaceChildren(...tiles.slice(0, 8).map(([label, value]) => el("div", {class: "tile"}, el("b", {}, number(value)), el("span", {}, label))));
}

function linesOf(panel) {
  const own = panel.role + " " + panel.number + " ";
  const found = Object.keys(state.curves).filter((series) => series.startsWith(own)).sort();
  const peers = new Set(found.map((series) => series.split(" ")[3]));
  // Where nodes agree, as replicas do, one line is enough.
  const same = new Map();
  for (const series of found) {
    const text = series.split(" ")[2] + JSON.stringify(state.curves[series]);
    if (!same.has(text)) same.set(text, []);
    same.get(text).push(series);
  }
  return [...same.values()].map(([series, ...others]) => {
    const [, , place, peer] = series.split(" "), value = panel.values[Number(place)];
    if (others.length) return {label: value.label, unit: value.unit, points: state.curves[series]};
    return {label: peers.size > 1 ? nameOf(peer) + (panel.values.length > 1 ? ", " + value.label : "") : value.label, unit: value.unit, points: state.curves[series]};
  }).filter((line) => line.points.length);
}

function drawCurves(byPanel) {
  let first = true;
  for (const {panel, key} of byPanel) {
    const lines = linesOf(panel);
    if (!lines.length) continue;
    let one = plots.get(key);
    if (!one) {
      const card = el("section", {class: "card curve " + (first ? "first" : "small")});
      const place = el("div", {class: "plot", role: "img"});
      const now = el("p", {class: "now"});
      card.append(el("h2", {}, panel.title), el("p", {class: "about"}, panel.about), now, place);
      card.title = first ? "" : panel.about;
      byId("curves").append(card);
      one = {now, place, plot: new Plot(place), height: first ? 216 : 92};
      plots.set(key, one);
    }
    first = false;
    one.now.replaceChildren(...legend(lines));
    const latest = lines.map((line) => [line, line.points[line.points.length - 1]]);
    one.place.setAttribute("aria-label", panel.title + ": " + latest.map(([line, point]) => `${line.label} from ${number(line.points[0][1], line.unit)} to ${number(point[1], line.unit)}`).join("; "));
    one.plot.draw(lines, {height: one.height});
  }
}

const BELOW = ["table", "samples"]; // what stands below all else, in this order

// Numbers of one node stand by themselves, those of several in a table beside each other.
const DRAWN = {
  figures(panel, nodes, card) {
    if (nodes.length > 1) {
      const head = el("tr", {}, el("td", {}), ...nodes.map(([peer]) => el("th", {scope: "col", class: "n"}, peerLink(peer))));
      const rows = panel.values.map((value, place) => [value, nodes.map(([, shown]) => shown[place])])
        .filter(([, cells]) => cells.some((cell) => cell !== null && cell !== undefined))
        .map(([value, cells]) => el("tr", {}, el("th", {scope: "row", title: value.about}, value.label), ...cells.map((cell) => el("td", {class: "n"}, said(number(cell, value.unit))))));
      card.append(wide(panel.title, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
      return;
    }
    for (const [, shown] of nodes) {
      const list = el("dl", {class: "figures"});
      panel.values.forEach((value, place) => {
        if (shown[place] === null || shown[place] === undefined) return;
        const label = el("dt", {}, value.label);
        if (value.about) label.title = value.about;
        list.append(el("div", {}, label, el("dd", {}, said(number(shown[place], value.unit)))));
      });
      card.append(list);
    }
  },
  counts(panel, nodes, card) {
    const sums = new Map();
    for (const [, rows] of nodes) for (const [name, count] of rows) sums.set(name, (sums.get(name) || 0) + count);
    const inOrder = [...sums.keys()].every((name) => /^\d+$/.test(name));
    const rows = [...sums].sort((a, b) => inOrder ? a[0] - b[0] : b[1] - a[1]).slice(0, 12), most = Math.max(1, ...rows.map((row) => row[1]));
    card.append(el("ul", {class: "bars"}, ...rows.map(([name, count]) => {
      const bar = el("i", {});
      bar.style.width = (100 * count / most).toFixed(1) + "%";
      return el("li", {}, el("span", {}, said(name)), el("b", {}, number(count)), el("div", {class: "track"}, bar));
    })));
  },
  table(panel, nodes, card) {
    card.classList.add("broad");
    const head = el("tr", {}, el("th", {scope: "col"}, "peer"), ...panel.values.map((value) => el("th", {scope: "col", class: numeric(nodes, panel, value) ? "n" : ""}, value.label)));
    const rows = nodes.flatMap(([, lines]) => lines).map(([name, ...cells]) => el("tr", {}, el("td", {class: "name"}, name in state.picture.peers ? peerLink(name) : said(/^12D3Koo\w{45}$/.test(name) ? shortened(name) : name)),
      ...cells.map((cell) => typeof cell === "number" ? el("td", {class: "n"}, number(cell)) : el("td", {class: "text long"}, said(typeof cell === "string" ? cell : number(cell ?? ""))))));
    card.append(wide(panel.title, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
  },
  samples(panel, nodes, card) {
    card.classList.add("broad");
    const rows = nodes.flatMap(([, samples]) => samples).slice(0, 10);
    card.append(el("ul", {class: "samples"}, ...rows.map(([question, answer, reward]) => el("li", {}, el("q", {}, said(question)), el("span", {class: "said"}, said(answer)),
      el("b", {class: reward >= 1 ? "right" : reward > 0 ? "" : "wrong"}, number(reward))))));
  },
};

function numeric(nodes, panel, value) {
  const place = panel.values.indexOf(value) + 1;
  return nodes.some(([, lines]) => lines.some((line) => typeof line[place] === "number"));
}

function drawPanels(place, byPanel) {
  if (place.contains(document.activeElement) && document.activeElement.scrollLeft) return; // somebody reads there
  const cards = byPanel.filter((one) => one.nodes.length).map(({panel, nodes}) => {
    const card = el("section", {class: "card"}, el("h2", {}, panel.title));
    if (panel.about) card.append(el("p", {class: "about"}, panel.about));
    DRAWN[panel.kind](panel, nodes, card);
    return card;
  });
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.replaceChildren(...cards);
  if (focused) [...place.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

// Peers.

function peerLink(peer) {
  const link = el("a", {href: "#peer=" + encodeURIComponent(peer), title: peer});
  link.append(said(nameOf(peer)));
  return link;
}

function openPeer(peer) { location.hash = "peer=" + encodeURIComponent(peer); }

const rowsShown = new Map(); // by peer: {text, row}

function drawPeers() {
  const peers = state.picture.peers, wanted = byId("find").value.trim().toLowerCase();
  const newest = Math.max(-1, ...Object.values(peers).map((row) => row.policy ?? -1));
  const rank = {self: 0, known: 1, alive: 2, gone: 3};
  const found = Object.entries(peers)
    .filter(([peer, row]) => !wanted || (peer + " " + (row.name || "") + " " + row.roles.join(" ")).toLowerCase().includes(wanted))
    .sort(([a, x], [b, y]) => rank[x.state] - rank[y.state] || ((x.name || a) < (y.name || b) ? -1 : 1));
  const rows = found.slice(0, MOST_ROWS).map(([peer, row]) => {
    const text = JSON.stringify([row, newest]), before = rowsShown.get(peer);
    if (before && before.text === text) return before.row;
    const made = peerRow(peer, row, newest);
    rowsShown.set(peer, {text, row: made});
    return made;
  });
  const body = byId("rows"), focused = body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  if (rows.length !== body.children.length || rows.some((row, place) => row !== body.children[place])) body.replaceChildren(...rows);
  if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  for (const peer of [...rowsShown.keys()]) if (!(peer in peers)) rowsShown.delete(peer);
  const left = found.length - rows.length;
  byId("more").textContent = left > 0 ? `${left.toLocaleString("en")} more: type above to find one.` : "";
  byId("census").replaceChildren(said(census(Object.values(peers).filter((row) => row.state !== "gone"))));
  document.querySelector(".find").hidden = Object.keys(peers).length <= 12;
}

// How many there are of each, the most first: ["4 inference", "1 trainer"].
function counted(words) {
  const counts = new Map();
  for (const word of words) counts.set(word, (counts.get(word) || 0) + 1);
  const rows = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  const rest = rows.slice(MOST_KINDS).reduce((sum, row) => sum + row[1], 0);
  return [...rows.slice(0, MOST_KINDS).map(([word, count]) => `${number(count)} ${clean(word)}`), ...(rest ? [`${number(rest)} of other kinds`] : [])];
}

// Members by role, software and policy, in sentences.
function census(rows) {
  const said = [counted(rows.flatMap((row) => row.roles.length ? row.roles : ["relay"])).join(", ") + "."];
  const holds = counted(rows.map((row) => row.policy >= 0 ? "hold policy " + number(row.policy) : "hold none")).join(", ");
  if (rows.some((row) => row.policy >= 0)) said.push(holds[0].toUpperCase() + holds.slice(1) + ".");
  const versions = counted(rows.filter((row) => row.version).map((row) => "run " + row.version));
  if (versions.length) said.push(versions.join(", ") + ".");
  const loads = rows.map((row) => row.load).filter((load) => typeof load === "number");
  if (loads.length) said.push(`Their load is ${number(loads.reduce((a, b) => a + b, 0) / loads.length, "share")} on average.`);
  return said.join(" ");
}

function stateOf(row, newest) {
  if (row.state === "gone") return ["gone", "gone"];
  const lag = row.policy === undefined ? 0 : newest - row.policy;
  return lag > 0 ? ["behind", lag === 1 ? "one policy behind" : lag + " policies behind"] : ["", row.state === "self" ? "this node" : "up to date"];
}

function peerRow(peer, row, newest) {
  const [kind, words] = stateOf(row, newest);
  return el("tr", {class: kind}, el("td", {class: "name"}, peerLink(peer)), el("td", {class: "text"}, said(row.roles.join(", ") || "relay")),
    el("td", {class: "n"}, row.policy >= 0 ? number(row.policy) : "–"), el("td", {}, el("span", {class: "state " + kind}, words)),
    el("td", {class: "n"}, number(row.received, "bytes")), el("td", {class: "n"}, number(row.sent, "bytes")),
    el("td", {class: "text long"}, said(row.says || (row.upload ? `uploads ${number(row.upload, "bytes")} a second` : ""))));
}

function moment(wall) { return new Date(wall * 1000).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"}); }

// A page for one peer, by the address's hash.
function drawPeer() {
  const box = byId("peer"), match = /^#peer=([^&]{1,200})$/.exec(location.hash);
  let peer = "";
  try { peer = match ? decodeURIComponent(match[1]) : ""; } catch { peer = ""; }
  const row = Object.hasOwn(state.picture.peers, peer) && state.picture.peers[peer]; // not "constructor"
  box.hidden = !row;
  if (!row) return;
  const newest = Math.max(-1, ...Object.values(state.picture.peers).map((one) => one.policy ?? -1));
  const facts = [["peer id", peer]];
  if (row.says) facts.push(["does now", row.says]);
  facts.push(["roles", row.roles.join(", ") || "none: it relays"], ["policy held", row.policy >= 0 ? row.policy : "none"], ["state", stateOf(row, newest)[1]]);
  if (row.since !== undefined && state.began) facts.push(["known since", moment(state.began + row.since)]);
  if (row.version) facts.push(["software", row.version]);
  if (row.links !== undefined) facts.push(["connected to", row.links === 1 ? "1 peer" : number(row.links) + " peers"]);
  else if (state.picture.own && row.state === "alive") facts.push(["linked to this node", row.linked ? "yes" : "no: heard of through others"]);
  if (row.upload) facts.push(["says it uploads", number(row.upload, "bytes") + " a second"]);
  if (row.load !== undefined) facts.push(["load", number(row.load, "share")]);
  for (const [key, size] of Object.entries(state.picture.flows).sort((a, b) => b[1] - a[1])) {
    const [from, to] = key.split(" ");
    if (from === peer) facts.push(["sent to " + nameOf(to), number(size, "bytes")]);
    if (to === peer) facts.push(["got from " + nameOf(from), number(size, "bytes")]);
  }
  for (const {panel, nodes} of panelsWithData()) {
    for (const [who, value] of nodes) {
      if (panel.kind === "figures" && who === peer) panel.values.forEach((one, place) => { if (value[place] !== null) facts.push([one.label, number(value[place], one.unit)]); });
      if (panel.kind === "table") for (const [name, ...cells] of value) if (name === peer) panel.values.forEach((one, place) => facts.push([one.label, number(cells[place])]));
    }
  }
  const list = el("dl", {class: "list"}, ...facts.flatMap(([label, value]) => [el("dt", {}, said(label)), el("dd", {}, said(value))]));
  const close = el("a", {href: "#", class: "close"}, "close");
  box.replaceChildren(close, el("h2", {}, said(nameOf(peer))), list);
}

function drawFacts() {
  const run = state.picture.run || {};
  const facts = [...state.picture.facts];
  if (state.picture.own) facts.unshift(["this node", state.picture.own]);
  if (run.id) facts.push(["run", run.id], ["owner", run.owner], ["epoch", run.epoch]);
  byId("about").hidden = !facts.length;
  byId("facts").replaceChildren(...facts.flatMap(([label, text]) => [el("dt", {}, said(label)), el("dd", {}, said(text))]));
}

// Life.

function drawPulse(isLost) {
  const pulse = byId("pulse");
  pulse.className = "pulse " + (isLost ? "lost" : "live");
  const seconds = Math.round(state.at), minutes = Math.floor(seconds / 60);
  const time = minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds / 10) * 10} s`;
  const words = isLost ? "connection lost, trying again" : `live, up ${time}`;
  if (pulse.textContent !== words) pulse.textContent = words;
}

function listen() {
  const source = new EventSource("/api/events");
  source.addEventListener("message", (event) => { state.heard = Date.now(); take(JSON.parse(event.data)); drawPulse(false); });
  source.addEventListener("error", () => {
    drawPulse(true);
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000); // refused: no seat, or the node restarts
  });
  return source;
}

addEventListener("hashchange", () => { if (state.picture) { drawPeer(); byId("peer").hidden || byId("peer").scrollIntoView(); } });
addEventListener("resize", redrawIfAny);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawIfAny);
byId("find").addEventListener("input", () => state.picture && drawPeers());
function redrawIfAny() { if (state.picture) redraw(); }

if (embedded) {
  const whole = JSON.parse(embedded.textContent);
  take(whole);
  const pulse = byId("pulse");
  pulse.className = "pulse";
  pulse.textContent = "as of " + moment(whole.wall);
} else {
  listen();
  setInterval(() => { if (state.heard && Date.now() - state.heard > SILENT) drawPulse(true); }, 1000);
}
