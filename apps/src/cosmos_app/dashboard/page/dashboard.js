"use strict";
// The page of a run of a language model. A sample may hold anything, so nothing that comes from the
// run is ever parsed as HTML.

const NUM_COLOURS = 6;
let askedWindow = "";

const chosenWindow = () => document.querySelector("input[name=window]:checked").value;
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)}%`);

// ------------------------------------------------------------------ asking

function ask() {
  const window_s = chosenWindow();
  if (window_s !== askedWindow) { askedWindow = window_s; tag = ""; }
  return askAt(`/api/page?window_s=${window_s}`, draw);
}

// ------------------------------------------------------------------ drawing

function draw(view) {
  showRun(view.run);
  drawFigures(view);
  drawSets(view.run.data_sets);
  drawTimeline(view.timeline, view.run.state);
  drawReplicas(view.replicas);
  drawBooks(view.run.books);
  drawSamples(view.samples);
  drawEvents(view.events);
}

const NO_CURVE = { times_s: [], steps: [], values: [] };
const last = (curve) => curve.values[curve.values.length - 1];

function figure(name, value, unit) {
  const output = byId(`f-${name}`);
  output.replaceChildren(value, " ", element("small", "", unit));
}

function drawFigures(view) {
  const curve = (name) => view.curves[name] || NO_CURVE;
  const bySteps = (name, style) => ({ xs: curve(name).steps, ys: curve(name).values, style });
  const byTime = (name, style) => ({ xs: curve(name).times_s, ys: curve(name).values, style });
  const measured = byVersion(view.run.accuracies, "dot");
  const newest = measured.ys.length ? `held-out ${shortNumber(measured.ys[measured.ys.length - 1])}` : "";
  figure("reward", shortNumber(last(curve("reward"))), newest);
  drawCurves(byId("c-reward"), [bySteps("reward", "first"), measured], true);
  figure("staleness", shortNumber(last(curve("staleness_mean"))), `mean, max ${shortNumber(last(curve("staleness_max")))}`);
  drawCurves(byId("c-staleness"), [bySteps("staleness_mean", "first"), bySteps("staleness_max", "second")], true);
  figure("tokens", shortNumber(last(curve("tokens_per_s"))), `engines idle ${percent(last(curve("rollout_idle")))}`);
  drawCurves(byId("c-tokens"), [byTime("tokens_per_s", "first")], true);
  figure("samples", shortNumber(last(curve("samples_per_s"))), `learner idle ${percent(last(curve("policy_idle")))}`);
  drawCurves(byId("c-samples"), [bySteps("samples_per_s", "first")], true);
  const queues = view.run.books.in_flight || {};
  const inFlight = Object.values(queues).reduce((a, b) => a + b, 0);
  figure("queues", shortNumber(inFlight), "groups in flight");
  drawCurves(byId("c-queues"), [bySteps("queue_generating", "first"), bySteps("queue_ready", "second"), bySteps("queue_waiting", "third")], true);
  const stalls = [...curve("stall_ms").values].sort((a, b) => a - b);
  figure("stalls", stalls.length ? String(Math.round(stalls[Math.floor(stalls.length / 2)])) : "–",
    stalls.length ? `median, max ${Math.round(stalls[stalls.length - 1])}` : "");
  drawCurves(byId("c-stalls"), [byTime("stall_ms", "dot")], true);
}

// Rewards by weight version as a series, in the order of versions.
function byVersion(rewards, style) {
  const found = Object.entries(rewards).map(([v, a]) => [Number(v), a]).sort((a, b) => a[0] - b[0]);
  return { xs: found.map((a) => a[0]), ys: found.map((a) => a[1]), style };
}

function drawSets(sets) {
  const names = Object.keys(sets), curves = names.map((name) => byVersion(sets[name], "first"));
  byId("sets").hidden = !names.length;
  byId("set-rows").replaceChildren(...names.map((name, i) => {
    const row = element("tr"), head = element("th", "", name), cell = element("td", "wide");
    const first = curves[i].ys[0], newest = curves[i].ys[curves[i].ys.length - 1];
    head.scope = "row";
    cell.append(svgElement("svg", { class: "small", role: "img", "aria-label": `held-out reward of ${name} by version` }));
    row.append(head, cell);
    for (const text of [first.toFixed(3), newest.toFixed(3), `${newest < first ? "" : "+"}${(newest - first).toFixed(3)}`])
      row.append(element("td", "", text));
    return row;
  }));
  byId("set-rows").querySelectorAll("svg").forEach((svg, i) => drawCurves(svg, [curves[i]], true));
}

function drawTimeline(lanes, state) {
  const box = byId("timeline");
  const measured = lanes.filter((lane) => lane.spans.length);
  if (!measured.length) return;
  const names = measured.map((lane) => lane.name).join("\n");
  if (box.dataset.names !== names) {
    box.dataset.names = names;
    box.replaceChildren(...[...measured.map((lane) => lane.name), ""].map((name) => {
      const row = element("div", name ? "lane" : "lane ticks");
      const svg = svgElement("svg", name ? { role: "img", "data-replica": name } : { "aria-hidden": "true" });
      row.append(element("span", "", name), svg);
      return row;
    }));
  }
  const end = Math.max(...measured.map((lane) => lane.spans[lane.spans.length - 1].end_s));
  const first = Math.min(...measured.map((lane) => lane.spans[0].start_s));
  const seconds = Math.max(1, Math.min(Number(chosenWindow()), end - first));
  const pictures = box.querySelectorAll("svg");
  measured.forEach((lane, i) => drawLane(pictures[i], lane, end - seconds, end));
  drawTicks(pictures[pictures.length - 1], seconds, state === "finished" ? "the end" : "now");
}

function drawReplicas(replicas) {
  if (!replicas.length) return;
  byId("replica-rows").replaceChildren(...replicas.map((replica) => {
    const row = element("tr");
    const head = element("th", "", replica.name);
    head.scope = "row";
    const stall = replica.num_loads ? `${Math.round(1000 * replica.stalled_s / replica.num_loads)} ms` : "–";
    const skipped = replica.num_skipped ? `, ${replica.num_skipped} skipped` : "";
    const weights = replica.publish_ms !== null ? `held up ${replica.publish_ms.toFixed(1)} ms${skipped}`
      : replica.served_s !== null ? `served after ${replica.served_s.toFixed(2)} s` : "–";
    const silent = replica.silent_s === null ? "–" : `${replica.silent_s.toFixed(1)} s`;
    row.append(head, element("td", "wide", replica.doing));
    for (const text of [replica.version === null ? "–" : String(replica.version), percent(replica.idle_share),
      replica.num_loads ? String(replica.num_loads) : "–", stall, weights, silent]) row.append(element("td", "", text));
    return row;
  }));
}

function drawBooks(books) {
  if (!books || books.issued === undefined) return;
  const parts = [`consumed ${books.consumed}`];
  for (const column of ["dropped", "in_flight"])
    for (const [name, count] of Object.entries(books[column] || {})) if (count) parts.push(`${name} ${count}`);
  setText("books", `Books, in groups: issued ${books.issued} = ${parts.join(" + ")}`);
}

function pictureRow(names) {
  const row = element("div", "pictures");
  names.forEach((name, index) => {
    const picture = element("img");
    picture.src = `/api/pictures/${encodeURIComponent(name)}`;
    picture.alt = `picture ${index + 1} of the prompt`;
    picture.loading = "lazy";
    row.append(picture);
  });
  return row;
}

function sampleItem(sample) {
  const item = element("li");
  const versions = [...new Set(sample.spans.map((span) => span.version).filter((v) => v >= 0))];
  const about = element("div", "about");
  about.append(element("span", "", `reward ${shortNumber(sample.reward)}`),
    element("span", "", versions.length > 1 ? `versions ${versions.join(", ")}` : `version ${versions.join("")}`),
    element("span", "", sample.replica), element("span", "", sample.group));
  if (sample.finish_reason === "length") about.append(element("span", "", "cut at the length limit"));
  if (sample.num_left_out) about.append(element("span", "", `${sample.num_left_out} more tokens`));
  const text = element("div", "text");
  for (const span of sample.spans) {
    const sampled = span.version >= 0;
    const colour = sampled ? `v-${span.version % NUM_COLOURS}` : "v-none";
    const part = element("span", `token-span ${colour}`, span.text);
    part.dataset.version = String(span.version);
    part.title = sampled ? `version ${span.version}, ${span.num_tokens} tokens` : "given, not sampled";
    text.append(part);
  }
  item.append(about);
  if (sample.pictures.length) item.append(pictureRow(sample.pictures));
  item.append(text);
  return item;
}

function drawSamples(samples) {
  const list = byId("samples");
  const key = samples.length ? `${samples[0].time_s} ${samples.length}` : "";
  if (!key || list.dataset.key === key) return;
  list.dataset.key = key;
  const top = list.scrollTop;
  list.replaceChildren(...samples.map(sampleItem));
  list.scrollTop = top;
}

async function drawEvents(milestones) {
  let told = milestones;
  if (byId("all-events").checked) {
    const answer = await fetch("/api/events?which=all", { cache: "no-store" });
    if (answer.ok) told = await answer.json();
  }
  if (!told.length) return;
  byId("events").replaceChildren(...told.map((event) => {
    const item = element("li");
    const moment = new Date(1000 * event.time_s);
    const time = element("time", "", moment.toLocaleTimeString([], { hour12: false }));
    time.dateTime = moment.toISOString();
    item.append(time, element("span", "", `${event.replica} ${event.text}`.trim()));
    return item;
  }));
}

// ------------------------------------------------------------------ life

for (const input of document.querySelectorAll("input[name=window]")) input.addEventListener("change", ask);
byId("all-events").addEventListener("change", () => { if (shown) drawEvents(shown.events); });
window.addEventListener("resize", () => { if (shown) { drawFigures(shown); drawTimeline(shown.timeline, shown.run.state); } });
askForEver(ask);
