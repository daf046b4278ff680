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
    for (const place of ["first", "curves", "counts", "figures", "panels"]) byId(place).replaceChildren();
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
  byId("learns").replaceChildren(said((picture.terms.find(([label]) => label === "learns") || ["", ""])[1]));
  const byPanel = panelsWithData(), drawn = drawTiles(byPanel);
  drawCurves(byPanel.filter((one) => one.panel.kind === "curve"));
  drawPanels(byId("counts"), byPanel.filter((one) => one.panel.kind === "counts"));
  drawPanels(byId("figures"), byPanel.filter((one) => one.panel.kind === "figures").sort((a, b) => (a.nodes.length > 1) - (b.nodes.length > 1)), drawn);
  drawPanels(byId("panels"), byPanel.filter((one) => BELOW.includes(one.panel.kind)).sort((a, b) => BELOW.indexOf(a.panel.kind) - BELOW.indexOf(b.panel.kind)));
  byId("map").hidden = !Object.keys(picture.flows).length;
  if (!byId("map").hidden) byId("map-words").textContent = map.draw(picture, nameOf, openPeer);
  byId("lead").classList.toggle("narrow", byId("map").hidden || !byId("first").children.length);
  drawPeers();
  drawPeer();
  drawFacts();
}

// Each panel of which something is there, with its nodes: [{panel, nodes: [[peer, value], ...]}].
function panelsWithData() {
  const first = (panel) => panel.role === "trainer" ? 0 : 1; // what it says of the run is newest
  return [...state.panels].sort((a, b) => first(a) - first(b)).map((panel) => {
    const role = state.picture.roles[panel.role] || {};
    const nodes = Object.entries(role).filter(([, shown]) => panel.number in shown).map(([peer, shown]) => [peer, shown[panel.number]]);
    return {panel, key: panel.role + " " + panel.number, nodes};
  });
}

// The share of weights' bytes that others than trainers have sent, where both ends are known.
function fromPeers() {
  const {peers, flows} = state.picture, isTrainer = (peer) => peers[peer]?.roles.includes("trainer");
  const came = Object.entries(flows).map(([key, size]) => [...key.split(" "), size]).filter(([, to]) => !isTrainer(to) && (!state.picture.own || to === state.picture.own));
  const all = came.reduce((sum, [, , size]) => sum + size, 0);
  return all ? came.filter(([from]) => from in peers && !isTrainer(from)).reduce((sum, [, , size]) => sum + size, 0) / all : null;
}

// Returns the values that need no other place: "panel value".
function drawTiles(byPanel) {
  const tiles = [], drawn = new Set();
  for (const {panel, key, nodes} of byPanel) {
    panel.values.forEach((value, place) => {
      if (!value.lead || panel.kind !== "figures") return;
      const found = nodes.map(([, shown]) => shown[place]).filter((one) => one !== null && one !== undefined);
      if (!found.length) return;
      if (tiles.some(([label]) => label === value.label)) { // another node has told it
        if (typeof found[0] === "string") drawn.add(key + " " + place);
        return;
      }
      if (found.length === 1 || typeof found[0] === "string") {
        const furthest = found.reduce((a, b) => parseFloat(String(b).replaceAll(",", "")) > parseFloat(String(a).replaceAll(",", "")) ? b : a);
        tiles.push([value.label, number(furthest, value.unit)]);
        if (found.every((one) => one === furthest)) drawn.add(key + " " + place);
      } else if (found.every((one) => typeof one === "number") && value.unit !== "share") tiles.push([value.label + " (all)", number(found.reduce((a, b) => a + b, 0), value.unit)]);
    });
  }
  const carried = fromPeers();
  if (carried !== null) tiles.push(["of weights from other peers", number(carried, "share")]);
  byId("tiles").replaceChildren(...tiles.slice(0, 6).map(([label, value]) => el("div", {class: "tile"}, el("b", {}, said(value)), el("span", {}, label))));
  return drawn;
}

function agree(one, other) {
  const at = new Map(one);
  return other.every(([x, y]) => !at.has(x) || at.get(x) === y);
}

function linesOf(panel) {
  const own = panel.role + " " + panel.number + " ";
  const found = Object.keys(state.curves).filter((series) => series.startsWith(own)).sort((a, b) => state.curves[b].length - state.curves[a].length);
  const lines = [];
  for (const series of found) {
    const [, , place, peer] = series.split(" "), points = state.curves[series], value = panel.values[Number(place)];
    // Where nodes agree, as replicas do, one line is enough.
    const same = lines.find((line) => line.value === value && agree(line.points, points));
    if (same) same.isShared = true;
    else if (points.length) lines.push({value, peer, points, unit: value.unit, place: Number(place)});
  }
  lines.sort((a, b) => a.place - b.place || (a.peer < b.peer ? -1 : 1));
  const several = new Set(lines.map((line) => line.place)).size < lines.length;
  for (const line of lines) line.label = several && !line.isShared ? nameOf(line.peer) + (panel.values.length > 1 ? ", " + line.value.label : "") : line.value.label;
  return lines;
}

// How far off a mean of rewards from 0 to 1 may be, by the tasks that it was measured on: 95 %.
function errorOf(share, tasks) { return tasks && share >= 0 && share <= 1 ? 1.96 * Math.sqrt(share * (1 - share) / tasks) : 0; }

function drawCurves(byPanel) {
  const all = byPanel.map((one) => ({...one, lines: linesOf(one.panel)})).filter((one) => one.lines.length);
  const leads = all.filter((one) => one.panel.lead).sort((a, b) => b.panel.values.length - a.panel.values.length);
  const first = leads[0] || (byId("curves").children.length ? null : all[0]);
  for (const {panel, key, lines, nodes} of all) {
    if (panel.lead && key !== leads[0].key) continue; // the run's, once
    let one = plots.get(key);
    if (!one) {
      const isFirst = first && key === first.key;
      const card = el("section", {class: "card curve " + (isFirst ? "first" : "small")});
      const place = el("div", {class: "plot", role: "img"});
      const now = el("p", {class: "now"});
      card.append(el("h2", {}, panel.title), el("p", {class: "about"}, panel.about), now, place);
      card.title = isFirst ? "" : panel.about;
      byId(isFirst ? "first" : "curves").append(card);
      one = {now, place, plot: new Plot(place), height: isFirst ? 300 : 104};
      plots.set(key, one);
    }
    const tasks = panel.tasks ? nodes.map(([, shown]) => shown[panel.values.length])[0] : 0;
    const whiskers = lines.flatMap((line, place) => line.points.map(([x, y]) => [x, y - errorOf(y, tasks), y + errorOf(y, tasks), place]).filter(([, low, high]) => tasks && high > low));
    one.now.replaceChildren(...legend(lines, one.height < 200 && lines.length < 2));
    if (tasks) one.now.append(el("small", {}, `± ${errorOf(lines[0].points.at(-1)[1], tasks).toFixed(3)}, of ${number(tasks)} tasks`));
    one.place.setAttribute("aria-label", panel.title + ": " + lines.map((line) => `${line.label} from ${number(line.points[0][1], line.unit)} to ${number(line.points.at(-1)[1], line.unit)}`).join("; "));
    one.plot.draw(lines, {height: one.height, whiskers, x: {label: one.height > 200 ? (panel.rows === "rounds" ? "round" : "step") : ""}});
  }
}

const BELOW = ["samples", "table"]; // what stands below all else, in this order

// Numbers of one node stand by themselves, those of several in a table beside each other.
const DRAWN = {
  figures(panel, nodes, card, drawn) {
    const said_ = (value) => value !== null && value !== undefined;
    const values = panel.values.map((value, place) => [value, nodes.map(([, shown]) => shown[place]), `${panel.role} ${panel.number} ${place}`])
      .filter(([, cells, key]) => cells.some((cell) => said_(cell) && cell !== 0) && !drawn.has(key));
    if (!values.length) return false;
    const label = (value, name) => { const made = el(name, name === "th" ? {scope: "row"} : {}, value.label); if (value.about) made.title = value.about; return made; };
    if (nodes.length > 1) {
      card.classList.add("broad");
      const head = el("tr", {}, el("td", {}), ...nodes.map(([peer]) => el("th", {scope: "col", class: "n"}, peerLink(peer))));
      const rows = values.map(([value, cells]) => el("tr", {}, label(value, "th"), ...cells.map((cell) => el("td", {class: typeof cell === "string" ? "n words" : "n"}, said(number(cell, value.unit))))));
      card.append(wide(panel.title, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
    } else card.append(el("dl", {class: "figures"}, ...values.map(([value, cells]) => el("div", {}, label(value, "dt"), el("dd", {}, said(number(cells[0], value.unit)))))));
    return true;
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
    const head = el("tr", {}, el("th", {scope: "col"}, panel.names), ...panel.values.map((value) => el("th", {scope: "col", class: numeric(nodes, panel, value) ? "n" : ""}, value.label)));
    const rows = nodes.flatMap(([, lines]) => lines).map(([name, ...cells]) => el("tr", {}, el("td", {class: "name"}, name in state.picture.peers ? peerLink(name) : said(/^12D3Koo\w{45}$/.test(name) ? shortened(name) : name)),
      ...cells.map((cell, place) => typeof cell === "number" ? el("td", {class: "n"}, panel.values[place].unit === "reward" ? cell.toFixed(3) : number(cell, panel.values[place].unit)) : el("td", {class: "text" + (cell ? " long" : "")}, said(cell ?? "")))));
    card.append(wide(panel.title, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
  },
  samples(panel, nodes, card) {
    card.classList.add("broad");
    const rows = nodes.map(([, samples]) => samples).sort((a, b) => b.length - a.length)[0].slice(0, 6);
    const given = (reward) => el("b", {class: reward === 1 ? "right" : reward === 0 ? "wrong" : ""}, number(reward));
    card.append(el("ul", {class: "samples"}, ...rows.map(([question, answer, reward, before, earlier]) => el("li", {}, el("q", {}, said(question)),
      ...(before === undefined ? [] : [el("span", {class: "said before"}, said(before)), given(earlier)]), el("span", {class: "said"}, said(answer)), given(reward)))));
  },
};

function numeric(nodes, panel, value) {
  const place = panel.values.indexOf(value) + 1;
  return nodes.some(([, lines]) => lines.some((line) => typeof line[place] === "number"));
}

function drawPanels(place, byPanel, drawn) {
  if (place.contains(document.activeElement) && document.activeElement.scrollLeft) return; // somebody reads there
  const cards = byPanel.filter((one) => one.nodes.length).flatMap(({panel, nodes}) => {
    const card = el("section", {class: "card"}, el("h2", {}, panel.title));
    if (panel.about) card.append(el("p", {class: "about"}, panel.about));
    return DRAWN[panel.kind](panel, nodes, card, drawn) === false ? [] : [card];
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
  byId("peers").classList.toggle("no-policy", newest < 0);
  byId("peers").hidden = Object.keys(peers).length < 2;
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
  const said = [counted(rows.flatMap((row) => row.roles.length ? row.roles : ["relay"])).map((one) => one + (one.startsWith("1 ") ? " node" : " nodes")).join(", ") + "."];
  const holds = counted(rows.map((row) => row.policy >= 0 ? "hold policy " + number(row.policy) : "hold none")).join(", ");
  if (rows.some((row) => row.policy >= 0)) said.push(holds[0].toUpperCase() + holds.slice(1) + ".");
  const versions = counted(rows.filter((row) => row.version).map((row) => "run " + row.version));
  if (versions.length) said.push(versions.join(", ") + ".");
  const loads = rows.map((row) => row.load).filter((load) => typeof load === "number");
  if (loads.some(Boolean)) said.push(`Their load is ${number(loads.reduce((a, b) => a + b, 0) / loads.length, "share")} on average.`);
  return said.join(" ");
}

function stateOf(row, newest) {
  if (row.state === "gone") return ["gone", "gone"];
  const lag = row.policy === undefined ? 0 : newest - row.policy;
  return lag > 0 ? ["behind", lag === 1 ? "one policy behind" : lag + " policies behind"] : ["", row.state === "self" ? "this node" : newest < 0 ? "alive" : "up to date"];
}

function peerRow(peer, row, newest) {
  const [kind, words] = stateOf(row, newest);
  return el("tr", {class: kind}, el("td", {class: "name"}, peerLink(peer)), el("td", {class: "text"}, said(row.roles.join(", ") || "relay")),
    el("td", {class: "n policy"}, row.policy >= 0 ? number(row.policy) : "–"), el("td", {}, el("span", {class: "state " + kind}, words)),
    el("td", {class: "n roomy"}, number(row.received, "bytes")), el("td", {class: "n roomy"}, number(row.sent, "bytes")),
    el("td", {class: "text long roomy"}, said(row.says || (row.upload ? `uploads ${number(row.upload, "bytes")} a second` : ""))));
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
  else if (state.picture.own && row.state === "alive") facts.push(["linked to this node", row.linked ? (row.path === "relay" ? "through a relay" : "yes") : "no: heard of through others"]);
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
  const facts = [...state.picture.terms.filter(([label]) => label !== "learns"), ...state.picture.facts];
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
