"use strict";
// What the pages of all kinds of runs share: they ask for their values once a second and draw what
// changed. Nothing that comes from a run is ever parsed as HTML.

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
let tag = "";
let shown = null;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

// Asks an address; `draw` is given the whole answer, if there is anything new.
async function askAt(address, draw) {
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(address, { headers, cache: "no-store" });
    if (answer.status === 401) return disconnected((await answer.text()).trim());
    if (answer.status === 304) { showRun(shown.run); return undefined; }
    if (!answer.ok) return disconnected(`The dashboard answers ${answer.status}.`);
    const view = await answer.json();
    tag = answer.headers.get("etag") || "";
    shown = view;
    await draw(view);
  } catch (error) {
    disconnected("The dashboard does not answer; the run may be over. Trying again.");
  }
  return undefined;
}

function disconnected(why) {
  const state = byId("state");
  state.dataset.state = "disconnected";
  setText("state", "disconnected");
  setText("message", why);
}

function showRun(run) {
  document.title = `${run.name}: ${run.state}`;
  setText("name", run.name);
  setText("state", run.state);
  byId("state").dataset.state = run.state;
  setText("steps", run.num_steps ? `step ${run.step} of ${run.num_steps}` : `step ${run.step}`);
  byId("progress").value = run.num_steps ? run.step / run.num_steps : 0;
  setText("message", run.message);
  byId("message").title = run.message;
}

async function askForEver(ask) {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((resume) => { setTimeout(resume, EVERY_MS); });
  }
}
