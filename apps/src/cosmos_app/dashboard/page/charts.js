"use strict";
// Small SVG pictures: curves in the figures, lanes in the timeline. All text goes through
// textContent; nothing here reads the network or keeps state.

const SVG = "http://www.w3.org/2000/svg";
const STATES = [
  "training", "updating", "publishing", "saving", "validating",
  "generating", "environment", "scoring", "swapping", "withheld",
];

function svgElement(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function shortNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// Each series is {xs, ys, style}; style is "first", "second", "third" or "dot".
function drawCurves(svg, series, fromZero) {
  const width = Math.max(svg.clientWidth, 60), height = svg.clientHeight || 64;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const drawn = series.filter((one) => one.xs.length > 0);
  const xs = drawn.flatMap((one) => one.xs), ys = drawn.flatMap((one) => one.ys);
  if (xs.length === 0) { svg.replaceChildren(); return; }
  const left = Math.min(...xs), right = Math.max(...xs);
  const low = fromZero ? Math.min(0, ...ys) : Math.min(...ys), high = Math.max(...ys, low + 1e-9);
  const x = (value) => 2 + (width - 4) * (right > left ? (value - left) / (right - left) : 0.5);
  const y = (value) => height - 3 - (height - 14) * (value - low) / (high - low);
  const parts = [
    svgElement("line", { class: "grid", x1: 0, x2: width, y1: y(low), y2: y(low) }),
    svgElement("text", { class: "axis", x: 1, y: 8 }, shortNumber(high)),
  ];
  for (const one of drawn) {
    if (one.style === "dot" || one.xs.length === 1) {
      for (let i = 0; i < one.xs.length; i += 1)
        parts.push(svgElement("circle", { class: "dot", cx: x(one.xs[i]), cy: y(one.ys[i]), r: 1.8 }));
    } else {
      const path = one.xs.map((value, i) => `${i ? "L" : "M"}${x(value).toFixed(1)} ${y(one.ys[i]).toFixed(1)}`);
      parts.push(svgElement("path", { class: one.style, d: path.join("") }));
    }
  }
  svg.replaceChildren(...parts);
}

// Mean share of each state between two moments, from the spans that overlap them.
function sharesBetween(spans, start, end) {
  const sums = {};
  for (const span of spans) {
    const overlap = Math.min(end, span.end_s) - Math.max(start, span.start_s);
    if (overlap <= 0) continue;
    for (const [state, share] of Object.entries(span.shares))
      sums[state] = (sums[state] || 0) + share * overlap / (end - start);
  }
  return sums;
}

function laneSummary(lane, start, end) {
  const shares = sharesBetween(lane.spans, start, end);
  const told = STATES.filter((state) => shares[state] > 0.005)
    .map((state) => `${state} ${Math.round(100 * shares[state])}%`);
  const busy = STATES.reduce((sum, state) => sum + (shares[state] || 0), 0);
  told.push(`idle ${Math.max(0, Math.round(100 * (1 - busy)))}%`);
  return `${lane.name}: ${told.join(", ")}; ${lane.stalls.length} new weight versions`;
}

function drawLane(svg, lane, start, end) {
  const width = Math.max(svg.clientWidth, 60), height = 26;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const x = (time) => width * (time - start) / (end - start);
  const parts = [];
  const add = (from, to, shares) => {
    let top = height;
    for (const state of STATES) {
      const tall = height * Math.min(1, shares[state] || 0);
      if (tall < 0.2) continue;
      top -= tall;
      parts.push(svgElement("rect", { class: state, x: x(from).toFixed(2), y: top.toFixed(2),
        width: Math.max(0.4, x(to) - x(from)).toFixed(2), height: tall.toFixed(2) }));
    }
  };
  const columns = Math.floor(width / 2);
  if (lane.spans.length <= columns) {
    for (const span of lane.spans) add(Math.max(start, span.start_s), span.end_s, span.shares);
  } else {
    const seconds = (end - start) / columns;
    for (let i = 0, first = 0; i < columns; i += 1) {
      const from = start + i * seconds;
      while (first < lane.spans.length && lane.spans[first].end_s <= from) first += 1;
      let last = first;
      while (last < lane.spans.length && lane.spans[last].start_s < from + seconds) last += 1;
      add(from, from + seconds, sharesBetween(lane.spans.slice(first, last), from, from + seconds));
    }
  }
  for (const stall of lane.stalls) {
    const mark = svgElement("rect", { class: "mark", x: x(stall.time_s).toFixed(2), y: 0,
      width: Math.max(1, x(stall.time_s) - x(stall.time_s - stall.stall_s)).toFixed(2), height: 5 });
    mark.append(svgElement("title", {}, `version ${stall.version}: stood still for ` +
      `${Math.round(1000 * stall.stall_s)} ms, ${Math.round(1000 * stall.transfer_s)} ms on its way`));
    parts.push(mark);
  }
  svg.replaceChildren(svgElement("title", {}, laneSummary(lane, start, end)), ...parts);
  svg.setAttribute("aria-label", laneSummary(lane, start, end));
}

function drawTicks(svg, seconds, lastWord) {
  const width = Math.max(svg.clientWidth, 60);
  svg.setAttribute("viewBox", `0 0 ${width} 14`);
  const parts = [];
  for (let i = 0; i <= 4; i += width < 340 ? 2 : 1) {
    const ago = seconds * (1 - i / 4);
    const before = ago >= 120 ? `${Math.round(ago / 60)} min` : `${Math.round(ago)} s`;
    const text = i === 4 ? lastWord : `${before} ${lastWord === "now" ? "ago" : "before"}`;
    parts.push(svgElement("text", { class: "axis", y: 11, x: width * i / 4,
      "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, text));
  }
  svg.replaceChildren(...parts);
}
