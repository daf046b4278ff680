"use strict";
// A report of the simulator: `#report` has its sentences, charts and tables (sim/run/report.py).

const report = JSON.parse(byId("report").textContent);

// A cell is a text, a number, [number, unit, words before it], {what, why} or {from, to, unit}.
function cellOf(cell) {
  if (cell.what) return el("td", {class: "what"}, clean(cell.what), ...(cell.why ? [el("small", {class: "quiet why"}, clean(cell.why))] : []));
  if (cell.from !== undefined) return el("td", {class: "n"}, cell.from === cell.to ? number(cell.to, cell.unit) : `${number(cell.from, cell.unit)} to ${number(cell.to, cell.unit)}`);
  const [value, unit, before] = Array.isArray(cell) ? cell : [cell, "", ""], verdict = {met: "ok", FAILED: "bad"}[(before || "").split(":")[0]] || "";
  return el("td", {class: verdict || (typeof value === "number" ? "n" : "text")}, (before ? before + " " : "") + clean(number(value, unit)));
}

function tableOf({title, head, rows}) {
  const top = el("tr", {}, ...head.map((name, place) => el("th", {scope: "col", class: rows.some((row) => cellOf(row[place]).classList.contains("n")) ? "n" : ""}, name)));
  const table = el("table", {}, el("thead", {}, top), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cellOf)))));
  return el("section", {class: "card broad"}, el("h2", {}, title), wide(title, table));
}

function drawReport() {
  const {title, says, verdict, is_ok, caption, foot, charts, tables} = report;
  document.title = clean(title);
  for (const [place, text] of Object.entries({title, says, verdict, caption, foot})) byId(place).textContent = clean(text || "");
  byId("verdict").className = is_ok ? "ok" : "bad";
  const drawn = charts.map((chart) => {
    const place = el("div", {class: "plot", role: "img", "aria-label": chart.about});
    const card = el("section", {class: "card curve" + (chart.rows ? " first" : "")}, el("h2", {}, chart.title.replaceAll("_", " ")), el("p", {class: "about"}, chart.about));
    if (chart.lines.length > 1) card.append(el("p", {class: "now"}, ...chart.lines.map((line, at) => el("span", {class: "c" + at % COLOURS.length}, el("i", {}), el("small", {}, line.label)))));
    card.append(place);
    return [card, new Plot(place), chart];
  });
  byId("charts").replaceChildren(...drawn.map(([card]) => card));
  for (const [, plot, chart] of drawn) plot.draw(chart.lines, {height: chart.rows ? 260 : 200, from_zero: true, ...chart});
  byId("tables").replaceChildren(...tables.filter((table) => table.rows.length).map(tableOf));
}

drawReport();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawReport);
