"use strict";
// Sends the settings of the form, draws the answer. One request at a time: the newest settings follow the last answer.

const byId = id => document.getElementById(id);
const form = byId("controls");
const SVG = new Set(["svg", "g", "line", "circle", "rect", "text", "tspan", "title"]);

function el(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

// --- Controls ---

const logarithm = (box, value) => Math.log(value / box.dataset.least) / Math.log(box.dataset.most / box.dataset.least);

/** Return the slider's value with two digits, so that settings repeat and their answers are kept. */
function fromSlider(box, share) {
  const value = box.dataset.least * (box.dataset.most / box.dataset.least) ** share;
  const rounded = Number(value.toPrecision(2));
  const whole = box.dataset.whole ? Math.round(rounded) : rounded;
  return Math.min(box.dataset.most, Math.max(box.dataset.least, whole));
}

function syncSlider(box) {
  const value = Number(box.querySelector("input[type=text]").value);
  const slider = box.querySelector("input[type=range]");
  if (value > 0) slider.value = Math.round(100 * Math.min(1, Math.max(0, logarithm(box, value))));
  slider.setAttribute("aria-valuetext", box.querySelector("input[type=text]").value);
}

function settings() {
  const found = new URLSearchParams();
  for (const input of form.querySelectorAll("input[type=text], input[type=radio]:checked")) {
    found.set(input.name, input.disabled ? "none" : input.value.trim());
  }
  return found;
}

/** Numbers that do not apply are switched off: by their check box, and predictions of joint rounds. */
function switchOff() {
  const joint = form.querySelector("input[name=algorithm]:checked").value !== "staged";
  for (const box of form.querySelectorAll("input[data-without]")) {
    const own = box.dataset.without === "prediction_epsilon" && joint;
    box.disabled = own;
    for (const input of box.closest(".control").querySelectorAll("input[type=text], input[type=range]")) {
      input.disabled = own || box.checked;
    }
  }
}

function restore() {
  for (const [name, value] of new URLSearchParams(location.search)) {
    const input = form.elements.namedItem(name);
    if (!input) continue;
    if (value === "none") form.querySelector(`input[data-without="${CSS.escape(name)}"]`)?.click();
    else input.value = value;
  }
}

// --- Charts ---

const WIDTH = 440;

function figure(title, height, ...drawn) {
  const chart = el("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": title }, ...drawn);
  return el("figure", { class: "chart" }, el("figcaption", {}, title), chart);
}

function gauge(each) {
  const at = 8 + 284 * (each.advantage ?? 0);
  const track = [el("line", { class: "track", x1: 8, x2: 292, y1: 10, y2: 10 })];
  if (each.released) {
    track.push(el("line", { class: "filled", x1: 8, x2: at, y1: 10, y2: 10 }), el("circle", { cx: at, cy: 10, r: 7 }));
  }
  const ticks = [["first", 0, "50, blind"], ["", 150, "75"], ["last", 300, "100, certain"]];
  track.push(...ticks.map(([kind, x, text]) => el("text", { class: `tick x ${kind}`, x, y: 32 }, text)));
  const said = each.released ? `${each.right} of 100 guesses are right` : "nothing released";
  return el("div", { class: `gauge${each.is_worst ? " worst" : ""}` },
    el("span", { class: "what" }, each.title, each.is_worst ? el("em", {}, " the worst") : null),
    each.released ? el("b", {}, String(each.right), el("small", {}, " of 100")) : el("b", { class: "none" }, "none released"),
    el("svg", { viewBox: "0 0 300 34", role: "img", "aria-label": `${each.title}: ${said}` }, ...track),
    el("span", {}, (each.epsilon ? `epsilon ${each.epsilon}, ` : "") + each.detail));
}

/** Accuracy against epsilon: the estimate as a band at the plan's epsilon, runs as points. */
function accuracyChart(epsilon, estimate, runs) {
  const left = 46, right = 424, top = 12, bottom = 200;
  const finite = runs.filter(run => typeof run.epsilon === "number" && run.epsilon > 0);
  const all = [epsilon, ...finite.map(run => run.epsilon)];
  const low = 10 ** Math.floor(Math.log10(Math.min(...all, 1))), high = 10 ** Math.ceil(Math.log10(Math.max(...all, 10)));
  const x = value => left + (right - left) * Math.log(value / low) / Math.log(high / low);
  const y = value => bottom - (bottom - top) * value;
  const drawn = [];
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    drawn.push(el("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      el("text", { class: "tick y", x: left - 7, y: y(tick) + 4 }, String(tick)));
  }
  for (let tick = low; tick <= high * 1.001; tick *= 10) {
    drawn.push(el("line", { class: "grid faint", x1: x(tick), x2: x(tick), y1: top, y2: bottom }),
      el("text", { class: `tick x ${tick > high / 2 ? "last" : ""}`, x: x(tick), y: bottom + 16 }, Number(tick.toPrecision(1)).toLocaleString("en")));
  }
  drawn.push(el("text", { class: "title", x: (left + right) / 2, y: 238 }, "epsilon of a cell, strict, from the server"));
  if (estimate) {
    drawn.push(el("line", { class: "band", x1: x(epsilon), x2: x(epsilon), y1: y(estimate.low), y2: y(estimate.high) },
      el("title", {}, `estimate at epsilon ${epsilon}: ${estimate.low} to ${estimate.high}`)));
  }
  for (const run of finite) {
    const place = { class: "mark c1", cx: x(run.epsilon), cy: y(run.accuracy), r: 5, "data-run": run.name };
    drawn.push(el("circle", place, el("title", {}, `${run.name}: ${run.epsilon.toPrecision(3)}, ${run.accuracy.toFixed(4)}`)));
  }
  const what = runs.length ? `estimate, and ${runs.length} run${runs.length === 1 ? "" : "s"} as points` : "estimate";
  return figure(`Accuracy against epsilon: ${what}`, 246, ...drawn);
}

function ruler(title, rows, least, most, ticks) {
  const each = 38, left = 12, right = 420, bottom = 6 + each * rows.length;
  const x = value => left + (right - left) * (value - least) / (most - least);
  const drawn = [];
  for (const tick of ticks) {
    const edge = tick === least ? "first" : tick === most ? "last" : "";
    drawn.push(el("line", { class: "grid faint", x1: x(tick), x2: x(tick), y1: 6, y2: bottom }),
      el("text", { class: `tick x ${edge}`, x: x(tick), y: bottom + 16 }, String(tick)));
  }
  rows.forEach(([name, value, shown], i) => {
    const y = 6 + each * i;
    drawn.push(el("text", { x: left, y: y + 14 }, `${name}: `, el("tspan", { class: "strong" }, shown)),
      el("line", { class: "stem", x1: left, x2: right, y1: y + 25, y2: y + 25 }),
      el("circle", { class: "mark c1", cx: x(value), cy: y + 25, r: 5 }));
  });
  return figure(title, bottom + 24, ...drawn);
}

function table(titles, rows) {
  const head = el("thead", {}, el("tr", {}, ...titles.map((title, i) => el("th", { scope: "col", class: i ? "number" : "" }, title))));
  const body = rows.map(row => el("tr", {}, ...row.map((cell, i) => i
    ? el("td", { class: cell.text ? "number" : "number empty", "data-title": titles[i], ...cell.data }, el("span", {}, cell.text, cell.small ? el("small", {}, cell.small) : null))
    : el("th", { scope: "row" }, el("span", {}, cell)))));
  return el("table", { class: "cards" }, head, el("tbody", {}, ...body));
}

// --- Answers ---

let history_ = { runs: [], ledgers: [] };
let shown = null;

function show(answer) {
  const said = answer.shown;
  shown = answer;
  byId("verdict").textContent = said.verdict;
  byId("gauges").replaceChildren(...said.gauges.map(gauge));
  byId("delta").textContent = said.delta;
  const tile = (value, what, more) => el("div", { class: "tile" }, el("b", {}, value), el("span", { class: "what" }, what), el("span", {}, more));
  const estimate = said.estimate;
  byId("tiles").replaceChildren(
    estimate ? tile(`${estimate.low.toFixed(2)} – ${estimate.high.toFixed(2)}`, "accuracy, an estimate", `blind guessing has ${estimate.blind}`)
      : tile("no estimate", "accuracy", "the planner's benchmark is of staged"),
    tile(said.bytes, "moved between all parties and the server", `${said.rounds} rounds`),
    tile(said.seconds, "on the line, computing aside", "100 Mbit/s, 20 ms a round trip"));
  byId("estimated").textContent = estimate
    ? `An estimate: the middle half of the ${estimate.records} nearest settings in the planner's benchmark of held-out tables, for `
      + "equally frequent classes, exact predictions and labels in clear. What columns say about classes matters more than any setting."
    : "";
  byId("charts").replaceChildren(...(estimate || history_.runs.length
    ? [accuracyChart(Number(settings().get("epsilon")), estimate, history_.runs)] : []));
  const units = [...new Set(said.bounds.map(row => row.unit))], froms = [...new Set(said.bounds.filter(row => row.unit !== "label").map(row => row.from))];
  const cell = (unit, from) => {
    const row = said.bounds.find(each => each.unit === unit && (each.from === from || unit === "label"));
    const labels = unit === "label" && from !== froms[0];
    return labels ? { text: "", small: "", data: {} }
      : { text: row.epsilon, small: unit === "label" ? "from all parties" : `at most ${row.right} of 100`,
        data: { "data-epsilon": row.value, "data-unit": unit, "data-from": row.from } };
  };
  byId("bounds").replaceChildren(table(["protects a", ...froms.map(from => `from ${from}`)],
    units.map(unit => [unit, ...froms.map(from => cell(unit, from))])));
  const seen = said.bounds.filter(row => row.unit !== "party");
  byId("attacks").replaceChildren(
    ruler("Right guesses of 100, at most", seen.map(row => [`${row.unit}, from ${row.from}`, row.right, String(row.right)]), 50, 100, [50, 75, 100]),
    ruler("Rows found of 1,000, with 1 false alarm in 1,000", seen.map(row => [`${row.unit}, from ${row.from}`, row.found, row.found.toLocaleString("en")]), 0, 1000, [0, 500, 1000]));
  byId("notes").replaceChildren(...answer.notes.map(note => el("li", {}, note)));
  const lines = said.plan.map(([title, text]) => el("tr", {}, el("th", { scope: "row" }, title), el("td", {}, text)));
  byId("plan").replaceChildren(el("table", { class: "facts" }, el("tbody", {}, ...lines)));
  byId("command").textContent = `${said.command}\n${said.train}`;
  byId("download").href = `plan.json?${settings()}`;
}

function complain(message) {
  const name = /^(\w+)=/.exec(message)?.[1];
  const field = name && byId(`${name}-error`);
  if (field) {
    field.textContent = message;
    field.closest(".control").classList.add("wrong");
  } else {
    byId("trouble").textContent = message;
    byId("trouble").hidden = false;
  }
}

let sending = false, sent = "";

async function send() {
  const wanted = settings().toString();
  if (sending || wanted === sent) return;
  sending = true;
  sent = wanted;
  byId("results").setAttribute("aria-busy", "true");
  history.replaceState(null, "", `?${wanted}`);
  try {
    const reply = await fetch(`plan?${wanted}`);
    const answer = await reply.json();
    for (const field of form.querySelectorAll(".error")) field.textContent = "";
    for (const box of form.querySelectorAll(".wrong")) box.classList.remove("wrong");
    byId("trouble").hidden = true;
    if (reply.ok) show(answer); else complain(answer.error);
    document.body.dataset.answered = wanted;
  } catch (error) {
    complain(`no answer: ${error.message}; is pbmvfl studio still running?`);
    sent = "";
  } finally {
    sending = false;
    byId("results").setAttribute("aria-busy", "false");
  }
  if (settings().toString() !== wanted && sent) send();
}

function showLedgers() {
  byId("ledgers-section").hidden = !history_.ledgers.length;
  byId("ledgers").replaceChildren(...history_.ledgers.map(each => {
    const spent = each.spent === "inf" ? 1 : Math.min(1, each.spent / each.limit);
    const left = each.spent === "inf" ? 0 : Math.max(0, each.limit - each.spent);
    const text = `${each.owner}, ${each.dataset}: ${left.toPrecision(3)} of ${each.limit} left for a ${each.unit}`;
    // No sliver of a bar: what is nearly nothing is drawn as nothing, and the text has the number.
    const width = spent > 0.99 ? 0 : 1000 * (1 - spent);
    return el("div", { class: "bar" }, text, el("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": text },
      el("rect", { class: "spent", x: 0, y: 0, width: 1000, height: 14, rx: 6 }), el("rect", { class: "left", x: 0, y: 0, width, height: 14, rx: 6 })));
  }));
}

let waiting = 0;
form.addEventListener("input", event => {
  const box = event.target.closest(".control");
  if (event.target.type === "range") box.querySelector("input[type=text]").value = fromSlider(box, event.target.value / 100);
  else if (box) syncSlider(box);
  switchOff();
  clearTimeout(waiting);
  waiting = setTimeout(send, 60);
});
form.addEventListener("submit", event => { event.preventDefault(); send(); });
byId("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(byId("command").textContent);
  byId("copied").textContent = "Copied.";
});

restore();
switchOff();
for (const box of form.querySelectorAll(".control")) syncSlider(box);
send();
fetch("history").then(reply => reply.json()).then(found => {
  history_ = found;
  showLedgers();
  if (shown) show(shown);
});
