"use strict";
// Curves (by uPlot) and the map. All text comes in as data and goes out as text.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["--one", "--two", "--three", "--four"];
const SPELT = ["share", "bytes", "bytes/s", "seconds"]; // units that `number` writes
const MOST_LINES = 8; // of one plot: more cannot be told apart
const LATELY = 2500; // milliseconds for which a line moves after chunks went along it
const WHOLE = [1, 2, 5].flatMap((one) => [...Array(12)].map((_, power) => one * 10 ** power)).sort((a, b) => a - b); // steps between marks of counts
const MOST_DOTS = 24; // of the map: as many as names fit around a circle
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function number(value, unit) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return value === undefined || value === null ? "–" : String(value);
  if (unit === "bytes/s") return number(value, "bytes") + "/s";
  if (unit === "bytes") {
    let size = value, name = "B";
    for (const next of ["kB", "MB", "GB", "TB"]) {
      if (size < 1000) break;
      size /= 1000; name = next;
    }
    return (Number.isInteger(size) || size >= 10 ? size.toFixed(0) : size.toFixed(1)) + " " + name;
  }
  if (unit === "share") return Number((100 * value).toPrecision(3)) + " %";
  if (unit === "seconds") return Number(value.toPrecision(3)).toLocaleString("en") + " s";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  if (size >= 10) return value.toFixed(1);
  return size >= 0.1 || value === 0 ? value.toFixed(3) : size < 1e-5 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}

// A number beside an axis.
function mark(value, unit) {
  return SPELT.includes(unit) ? number(Number(value.toPrecision(6)), unit) : Math.abs(value) >= 1000 ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));
}

function byId(id) { return document.getElementById(id); }

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

function clean(text) { return String(text).replace(CONTROLS, "\ufffd"); }

// A stranger's words.
function said(text) {
  const made = document.createElement("bdi");
  made.textContent = clean(text);
  return made;
}

// Scrolls by itself, also with a keyboard, so that the page does not.
function wide(title, table) { return el("div", {class: "wide", tabindex: "0", role: "region", "aria-label": title}, table); }

// One plot. `lines`: [{label, unit, points: [[x, y, note], ...], bars}], all of one unit. `more`: {height, x: {label, unit},
// from_zero} and what lies beside the lines: shades [[from, to, name]], lives [[row, from, to]] of `rows` rows,
// whiskers [[x, low, high, line]], bands [[low, high, line]], dots [[x, y, line, name]].
class Plot {
  constructor(place) {
    this.place = place;
    this.plot = null;
    this.shape = "";
    this.tip = el("div", {class: "tip", hidden: ""});
    // A card becomes narrower when others come beside it.
    new ResizeObserver(() => { if (this.plot) this.draw(this.lines, this.more); }).observe(place);
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

  draw(all, more) {
    const lines = this.lines = all.slice(0, MOST_LINES), unit = lines[0].unit, x = more.x || {};
    this.more = more;
    const data = Plot.aligned(lines);
    const width = Math.max(120, Math.floor(this.place.clientWidth));
    const shape = [width, more.height, lines.length, colour("--ink"), colour("--one")].join();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.shape = shape;
    const axis = {
      stroke: colour("--quiet"), font: "12px system-ui, sans-serif",
      grid: {stroke: colour("--line"), width: 1}, ticks: {show: false},
    };
    const small = more.height < 120, bars = lines.some((line) => line.bars);
    const beside = [...(more.whiskers || []).flatMap((one) => [one[1], one[2]]), ...(more.bands || []).flatMap((one) => [one[0], one[1]]), ...(more.dots || []).map((one) => one[1])];
    const yRange = more.rows ? {range: [0, more.rows]} : more.from_zero || beside.length ? {range: (_, low, high) => {
      const least = Math.min(more.from_zero ? 0 : Infinity, low ?? 0, ...beside), most = Math.max(high ?? 0, ...beside);
      return least === most ? [0, 1] : [least, most + 0.06 * (most - least)];
    }} : {};
    const whole = (values) => values.every((one) => one === null || Number.isInteger(one)) ? WHOLE : undefined;
    const step = bars && data[0].length > 1 ? (data[0][1] - data[0][0]) / 2 : 0;
    this.plot = new uPlot({
      width, height: more.height, legend: {show: false}, cursor: {points: {size: 7}, drag: {x: false, y: false}, y: false},
      padding: [6, 18, 0, 0],
      scales: {x: {time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low - step, high + step]}, y: yRange},
      axes: [
        {...axis, size: 24, gap: 4, space: small ? 44 : 80, grid: {show: false}, label: x.label || null, labelSize: 18, labelGap: 0, labelFont: axis.font, incrs: whole(data[0]),
          values: (_, marks) => marks.map((one) => mark(one, x.unit))},
        {...axis, size: (_, texts) => 12 + 7 * Math.max(3, ...(texts || []).map((text) => text.length)), gap: 4, incrs: beside.length ? undefined : whole(data.slice(1).flat()), space: small ? 30 : 44,
          values: (_, marks) => marks.map((one) => mark(one, unit))},
      ],
      series: [{}, ...lines.map((line, place) => ({
        label: line.label, stroke: line.hidden ? "transparent" : colour(COLOURS[place % COLOURS.length]), width: line.bars ? 0 : 2, spanGaps: true,
        dash: place >= COLOURS.length ? [6, 4] : undefined, fill: line.bars ? colour("--one") : undefined,
        paths: line.bars ? uPlot.paths.bars({size: [0.9, 100]}) : line.dots ? () => null : undefined,
        points: {show: !line.hidden && !line.bars && (line.dots || line.points.length < 2), size: 6},
      }))],
      hooks: {drawAxes: [(u) => this.beside(u)], setCursor: [(u) => this.point(u)]},
    }, data, this.place);
    this.plot.over.append(this.tip);
  }

  // Below the lines.
  beside(u) {
    const {left, top, width, height} = u.bbox, context = u.ctx, {shades, lives, rows, whiskers, bands, dots} = this.more;
    const x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true), dot = 2.5 * devicePixelRatio;
    const fill = (name, alpha) => { context.fillStyle = colour(name); context.globalAlpha = alpha; };
    context.save();
    context.beginPath(); context.rect(left, top, width, height); context.clip();
    fill("--one", 0.8);
    for (const [row, from, to] of lives || []) context.fillRect(x(from), y(row + 1), Math.max(1, x(to) - x(from)), Math.max(1, height / rows - (height / rows > 3 ? 1 : 0)));
    fill("--two", 0.16);
    for (const [from, to] of shades || []) context.fillRect(x(from), top, Math.max(2, x(to) - x(from)), height);
    for (const [low, high, line] of bands || []) { fill(COLOURS[line % 4], 0.14); context.fillRect(left, y(high), width, Math.max(2, y(low) - y(high))); }
    for (const [at, low, high, line] of whiskers || []) { fill(COLOURS[line % 4], 0.35); context.fillRect(x(at) - dot, y(high), 2 * dot, Math.max(2, y(low) - y(high))); }
    for (const [at, value, line] of dots || []) { fill(COLOURS[line % 4], 0.6); context.beginPath(); context.arc(x(at), y(value), dot, 0, 7); context.fill(); }
    context.restore();
  }

  // What lies under the pointer, in words.
  point(u) {
    const {left, top, idx} = u.cursor, x = this.more.x || {}, at = u.data[0][idx];
    this.tip.hidden = !(left >= 0) || at === undefined;
    if (this.tip.hidden) return;
    const near = (one) => Math.abs(u.valToPos(one[0], "x") - left) < 8 && (one.length < 4 || Math.abs(u.valToPos(one[1], "y") - top) < 8);
    const rows = [...(this.more.dots || []).filter(near).slice(0, 4).map((one) => `${one[3]}: ${number(one[1], this.lines[0].unit)}`)];
    for (const line of rows.length ? [] : this.lines) {
      const found = line.points.find((point) => point[0] === at);
      if (found) rows.push(found[2] || `${line.label} ${number(found[1], line.unit)}`);
    }
    for (const [from, to, name] of this.more.shades || []) if (u.posToVal(left, "x") >= from && u.posToVal(left, "x") <= to) rows.push(name);
    this.tip.replaceChildren(...(this.lines.some((line) => line.bars) ? [] : [el("b", {}, `${x.label || "step"} ${number(at, x.unit)}`)]), ...rows.map((row) => el("span", {}, clean(row))));
    const flips = left > u.over.clientWidth / 2;
    this.tip.style.left = flips ? "" : left + 12 + "px";
    this.tip.style.right = flips ? u.over.clientWidth - left + 12 + "px" : "";
  }
}

// The newest number of each line, with its colour; `isNamed`: the title above says what it is.
function legend(lines, isNamed) {
  return lines.slice(0, MOST_LINES).map((line, place) => {
    const last = line.points[line.points.length - 1];
    return el("span", {class: "c" + (place % COLOURS.length)}, el("i", {}), number(last[1], line.unit), " ", el("small", {}, [isNamed ? "" : clean(line.label), SPELT.includes(line.unit) ? "" : line.unit].filter(Boolean).join(", ")));
  });
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
    // 12 pixels on the screen, in units of the drawing
    const size = this.size = 12.1 * Math.max(1, 420 / Math.min(470, this.place.clientWidth || 420));
    const newest = Math.max(-1, ...shown.map((peer) => peers[peer].policy ?? -1));
    const svg = node("svg", {viewBox: `0 ${Math.min(0, 22 - 2 * size)} 420 ${350 - Math.min(0, 22 - 2 * size)}`, role: "img", "font-size": size});
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
    const label = node("text", {x, y: below ? y + 15 + this.size : y - 20 - this.size});
    label.textContent = clean(crowded ? name.slice(0, 8) : name.slice(0, 16));
    const sub = node("text", {x, y: below ? y + 17 + 2 * this.size : y - 18, class: "sub"});
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
