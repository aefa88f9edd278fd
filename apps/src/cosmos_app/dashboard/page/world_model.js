"use strict";
// The page of a world model's run: its curves, and its validation samples side by side: a row for
// each prompt, a column for each validation.

const MOST_NAME = 40;
// What is seen before the samples; failures are once there are any. The rest is below, folded up.
const MAIN = new Set(["reward", "loss", "validation_loss", "reward_std", "kl", "grad_norm", "samples_per_s", "step_s"]);
const FAILURES = new Set(["skipped", "rewards_failed", "samples_left_out", "groups_without_signal", "validation/failed"]);
let galleryRevision = -1;
let validations = [];
let enlarged = null;

// ------------------------------------------------------------------ figures

const isMain = ({ name, values }) =>
  MAIN.has(name) || /^(validation\/)?reward(\/|$)/.test(name) || (FAILURES.has(name) && values.some((value) => value !== 0));

function drawFigures(curves) {
  const others = curves.filter((curve) => !isMain(curve));
  drawBox(byId("figures"), curves.filter(isMain));
  byId("others").hidden = others.length === 0;
  setText("others-title", `Other figures (${others.length})`);
  drawBox(byId("other-figures"), others);
}

function drawBox(box, curves) {
  const key = JSON.stringify(curves.map((curve) => curve.name));
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(...curves.map((curve) => {
      const figure = element("figure"), caption = element("figcaption", "", curve.name);
      caption.title = curve.name;
      const label = `${curve.name.slice(0, MOST_NAME)} by step`;
      figure.append(caption, element("output"), svgElement("svg", { role: "img", "aria-label": label }));
      return figure;
    }));
  }
  box.querySelectorAll("figure").forEach((figure, i) => {
    const curve = curves[i];
    figure.querySelector("output").textContent = figureText(curve.values[curve.values.length - 1]);
    const style = curve.name.startsWith("validation/") ? "second" : "first";
    drawCurves(figure.querySelector("svg"), [{ xs: curve.steps, ys: curve.values, style }], false);
  });
}

const figureText = (value) => (value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1) : shortNumber(value));

// ------------------------------------------------------------------ gallery

const fileAddress = (step, file) => `/api/gallery/${step}/${file.split("/").map(encodeURIComponent).join("/")}`;
const rewardText = (sample) => {
  if (sample.reward !== null) return `reward ${sample.reward.toFixed(3)}`;
  return sample.problems.length ? "reward failed" : "";
};
const chosenColumn = () => Number(byId("column").value || 0);

// Prompts in the order of their rows; a run that goes on with other prompts has more rows.
function promptsOf() {
  const found = new Map();
  for (const validation of validations)
    for (const sample of validation.samples) found.set(`${sample.row} ${sample.prompt}`, sample);
  return [...found.values()].sort((a, b) => a.row - b.row);
}

function sampleOf(validation, row, prompt) {
  const column = chosenColumn();
  return validation.samples.find((s) => s.row === row && s.prompt === prompt && s.column === column);
}

function drawChoice() {
  const columns = [...new Set(validations.flatMap((v) => v.samples.map((s) => s.column)))].sort((a, b) => a - b);
  const select = byId("column"), before = select.value;
  select.replaceChildren(...columns.map((column) => {
    const option = element("option", "", String(column + 1));
    option.value = String(column);
    return option;
  }));
  if (columns.includes(Number(before)) && before) select.value = before;
  byId("choice").hidden = columns.length < 2;
}

function drawGallery() {
  byId("gallery-table").hidden = !validations.length;
  if (!validations.length) {
    setText("gallery-note", "There are no samples to show: the recipe has no [validation], or its gallery " +
      "is 0, or the run is of a version that wrote grids alone (validation/step_N/grid.png).");
    return;
  }
  setText("gallery-note", "Each column is a validation, each row a prompt. Click a sample to enlarge it.");
  byId("gallery-steps").replaceChildren(...["prompt", ...validations.map((v) => `step ${v.step}`)].map((text) => {
    const head = element("th", "", text);
    head.scope = "col";
    return head;
  }));
  byId("gallery-rows").replaceChildren(...promptsOf().map(({ row, prompt }) => {
    const line = element("tr"), head = element("th", "", prompt);
    head.scope = "row";
    line.append(head, ...validations.map((v, index) => sampleCell(v, index, sampleOf(v, row, prompt))));
    return line;
  }));
}

function sampleCell(validation, index, sample) {
  const cell = element("td");
  if (!sample) return cell;
  const button = element("button", sample.video ? "sample film" : "sample"), picture = element("img");
  button.type = "button";
  picture.loading = "lazy";
  picture.src = fileAddress(validation.step, sample.picture);
  picture.alt = `${sample.prompt}, after step ${validation.step}`;
  button.append(picture, element("span", "", rewardText(sample)));
  button.addEventListener("click", () => enlarge(index, sample.row, sample.prompt));
  cell.append(button);
  return cell;
}

function enlarge(index, row, prompt) {
  const validation = validations[index], sample = validation && sampleOf(validation, row, prompt);
  if (!sample) return;
  enlarged = { index, row, prompt };
  const address = fileAddress(validation.step, sample.video || sample.picture);
  const media = element(sample.video ? "video" : "img");
  if (sample.video) {
    Object.assign(media, { controls: true, loop: true, muted: true, autoplay: true });
    media.poster = fileAddress(validation.step, sample.picture);
  } else {
    media.alt = sample.prompt;
  }
  media.src = address;
  byId("enlarged-media").replaceChildren(media);
  setText("enlarged-prompt", sample.prompt);
  setText("enlarged-step", `step ${validation.step}, sample ${sample.column + 1}, seed ${sample.seed}`);
  const parts = Object.entries(sample.rewards).map(([name, reward]) => `${name} ${reward.toFixed(4)}`);
  setText("enlarged-rewards", [rewardText(sample), ...parts, ...sample.problems].filter(Boolean).join(" · ") || "no rewards");
  if (!byId("enlarged").open) byId("enlarged").showModal();
}

function turn(by) {
  if (enlarged) enlarge(enlarged.index + by, enlarged.row, enlarged.prompt);
}

// ------------------------------------------------------------------ life

async function draw(view) {
  showRun(view.run);
  drawFigures(view.curves);
  if (view.gallery_revision === galleryRevision) return;
  const answer = await fetch("/api/gallery", { cache: "no-store" });
  if (!answer.ok) return;
  validations = await answer.json();
  galleryRevision = view.gallery_revision;
  drawChoice();
  drawGallery();
}

byId("column").addEventListener("change", drawGallery);
byId("earlier").addEventListener("click", () => turn(-1));
byId("later").addEventListener("click", () => turn(1));
byId("enlarged").addEventListener("close", () => { enlarged = null; byId("enlarged-media").replaceChildren(); });
byId("enlarged").addEventListener("keydown", (event) => {
  if (event.target.tagName === "VIDEO") return;
  if (event.key === "ArrowLeft") turn(-1);
  if (event.key === "ArrowRight") turn(1);
});
byId("others").addEventListener("toggle", () => { if (shown) drawFigures(shown.curves); });
window.addEventListener("resize", () => { if (shown) drawFigures(shown.curves); });
askForEver(() => askAt("/api/page", draw));
