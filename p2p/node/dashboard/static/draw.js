"use strict";
// Curves (by uPlot) and the map. All text comes in as data and goes out as text.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["--one", "--two", "--three", "--four"];
const MOST_LINES = 8; // of one plot: more cannot be told apart
const LATELY = 2500; // milliseconds for which a line moves after chunks went along it
const MOST_DOTS = 24; // of the map: as many as names fit around a circle

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function number(value, unit) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return value === undefined || value === null ? "–" : String(value);
  if (unit === "bytes") {
    let size = value, name = "B";
    for (const next of ["kB", "MB", "GB", "TB"]) {
      if (size < 1000) break;
      size /= 1000; name = next;
    }
    return (name === "B" ? String(size) : size.toFixed(size < 10 ? 1 : 0)) + " " + name;
  }
  if (unit === "share") return (100 * value).toFixed(value < 0.1 ? 2 : 1) + " %";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value), text = size >= 100 ? value.toFixed(0) : size >= 0.1 || value === 0 ? value.toFixed(3) : size < 1e-5 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
  return unit === "seconds" ? text + " s" : text;
}

// One plot of several lines. `lines`: [{label, points: [[x, y], ...]}], all of one panel.
class Plot {
  constructor(place) {
    this.place = place;
    this.plot = null;
    this.shape = "";
  }

  // Every x of any line once, in order, and each line's value there.
  static aligned(lines) {
    const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const at = new Map(xs.map((x, place) => [x, place]));
    return [xs, ...lines.map((line) => {
      const ys = new Array(xs.length).fill(null);
      for (const [x, y] of line.points) ys[at.get(x)] = y;
      return ys;
    })];
  }

  draw(all, height, unit) {
    const lines = all.slice(0, MOST_LINES);
    const data = Plot.aligned(lines);
    const width = Math.max(120, Math.floor(this.place.clientWidth));
    const shape = [width, height, lines.length, colour("--ink"), colour("--one")].join();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.shape = shape;
    const axis = {
      stroke: colour("--quiet"), font: "11px system-ui, sans-serif",
      grid: {stroke: colour("--line"), width: 1}, ticks: {show: false},
    };
    const small = height < 120;
    this.plot = new uPlot({
      width, height, legend: {show: false}, cursor: {points: {size: 7}, drag: {x: false, y: false}},
      padding: [6, 12, 0, 0],
      scales: {x: {time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high]}},
      axes: [
        {...axis, size: 24, gap: 4, space: small ? 56 : 70, grid: {show: false},
          values: (_, marks) => marks.map((mark) => Number.isInteger(mark) ? mark.toLocaleString("en") : "")},
        {...axis, size: small ? 44 : 48, gap: 4, space: small ? 30 : 44,
          values: (_, marks) => marks.map((mark) => unit === "share" ? (100 * mark).toFixed(mark && Math.abs(mark) < 0.01 ? 1 : 0) + "%" : String(Number(mark.toPrecision(6))))},
      ],
      series: [{}, ...lines.map((line, place) => ({
        label: line.label, stroke: colour(COLOURS[place % COLOURS.length]), width: 2, spanGaps: true,
        dash: place >= COLOURS.length ? [6, 4] : undefined,
        points: {show: line.points.length < 2, size: 6},
      }))],
    }, data, this.place);
  }
}

// Who feeds whom: dots on an ellipse, the busiest sender in the middle.
class Map_ {
  constructor(place) {
    this.place = place;
    this.before = new Map(); // bytes by flow
    this.grown = new Map(); // when it last grew, by flow
    this.shape = "";
  }

  // Call once a change: what grew is flowing.
  note(flows) {
    for (const [key, size] of Object.entries(flows)) {
      if (this.before.has(key) && size > this.before.get(key)) this.grown.set(key, Date.now());
      this.before.set(key, size);
    }
    for (const key of [...this.before.keys()]) {
      if (!(key in flows)) { this.before.delete(key); this.grown.delete(key); }
    }
  }

  draw(picture, nameOf, open) {
    const flows = picture.flows, peers = picture.peers;
    const moved = new Map();
    for (const [key, size] of Object.entries(flows)) {
      for (const peer of key.split(" ")) moved.set(peer, (moved.get(peer) || 0) + size);
    }
    const all = Object.keys(peers);
    const shown = all.filter((peer) => all.length <= MOST_DOTS || moved.has(peer) || peers[peer].state === "known" || peers[peer].state === "self")
      .sort((a, b) => (moved.get(b) || 0) - (moved.get(a) || 0)).slice(0, MOST_DOTS);
    if (picture.own in peers && !shown.includes(picture.own)) shown[shown.length - 1] = picture.own;
    if (!shown.length) { this.place.replaceChildren(); return "No peers yet."; }
    const centre = picture.own in peers ? picture.own : shown.find((peer) => (peers[peer].roles || []).includes("trainer")) || shown[0];
    const around = shown.filter((peer) => peer !== centre).sort((a, b) => nameOf(a) < nameOf(b) ? -1 : 1);
    const crowded = around.length > 12;
    const spots = new Map([[centre, [210, 165]]]);
    around.forEach((peer, place) => {
      const angle = -Math.PI / 2 + 2 * Math.PI * place / Math.max(1, around.length);
      spots.set(peer, [210 + 150 * Math.cos(angle), 165 + 122 * Math.sin(angle)]);
    });
    const newest = Math.max(-1, ...shown.map((peer) => peers[peer].policy ?? -1));
    const svg = node("svg", {viewBox: "0 0 420 350", role: "img"});
    const keys = Object.keys(flows).filter((key) => key.split(" ").every((peer) => spots.has(peer)));
    const most = Math.max(1, ...keys.map((key) => flows[key]));
    let busy = 0;
    for (const key of keys) {
      const [from, to] = key.split(" "), isNow = Date.now() - (this.grown.get(key) || 0) < LATELY;
      busy += isNow ? 1 : 0;
      const path = node("path", {d: bow(spots.get(from), spots.get(to)), class: isNow ? "flow now" : "flow"});
      path.style.strokeWidth = String(1 + 5 * Math.sqrt(flows[key] / most));
      svg.append(path);
    }
    for (const [peer, [x, y]] of spots) svg.append(this.dot(peer, peers[peer], x, y, newest, (peers[peer].roles || []).includes("trainer"), crowded, nameOf, open));
    const words = keys.length ? `${keys.length} ways carry weights between ${shown.length} peers${busy ? `, ${busy} of them now` : ""}.` : "No weights have travelled yet.";
    const rest = all.length - shown.length;
    svg.setAttribute("aria-label", words);
    this.place.replaceChildren(svg);
    return rest > 0 ? `${words} ${rest.toLocaleString("en")} more peers are in the table.` : words;
  }

  dot(peer, row, x, y, newest, isOrigin, crowded, nameOf, open) {
    const group = node("g", {});
    const lag = row.policy === undefined ? 0 : newest - row.policy;
    const state = row.state === "gone" ? " gone" : lag > 0 ? " behind" : row.state === "self" ? " self" : isOrigin ? " origin" : "";
    group.append(node("circle", {cx: x, cy: y, r: crowded ? 7 : 11, class: "dot" + state}));
    const name = row.name ? nameOf(peer) : row.state === "self" ? "this node" : (row.roles || [])[0] || "relay";
    const below = y >= 165;
    const label = node("text", {x, y: below ? y + 27 : y - 32});
    label.textContent = clean(crowded ? name.slice(0, 8) : name.slice(0, 16));
    const sub = node("text", {x, y: below ? y + 41 : y - 18, class: "sub"});
    const holds = row.state === "gone" ? "gone" : row.policy >= 0 ? "policy " + row.policy : "no policy";
    sub.textContent = row.name ? holds : peer.slice(-4) + ", " + holds;
    group.append(label);
    if (!crowded) group.append(sub);
    group.addEventListener("click", () => open(peer));
    group.style.cursor = "pointer";
    return group;
  }
}

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

// A line that bends to its right, so that the two directions lie apart, and ends at the dots' rims.
function bow([ax, ay], [bx, by]) {
  const long = Math.hypot(bx - ax, by - ay) || 1, ux = (bx - ax) / long, uy = (by - ay) / long, rim = 14;
  const mx = (ax + bx) / 2 - uy * long * 0.09, my = (ay + by) / 2 + ux * long * 0.09;
  return `M${ax + ux * rim},${ay + uy * rim} Q${mx},${my} ${bx - ux * rim},${by - uy * rim}`;
}
