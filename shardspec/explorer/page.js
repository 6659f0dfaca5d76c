// The tables are made and described by shardspec/explorer/page.py. Nothing here computes a price:
// prices of plans are sums of those of their moves, in the order of the moves.

const tables = JSON.parse(document.getElementById("tables").textContent);
const element = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const state = { mesh: 0, shape: 0, links: 0, source: 0, target: 0, plan: 0, at: 0, follow: -1 };
const MOVE = { from: 0, to: 1, kind: 2, text: 3, received: 4, live: 5, senders: 6 };
const STEP_MS = 1800;

// ---------------------------------------------------------------- numbers as the library shows them

function short(value) {
  // Like "%.4g": four digits, ties to even, without trailing zeros.
  if (value === 0) return "0";
  let [digits, power] = value.toExponential(3).split("e");
  const exact = value.toExponential(60).split("e")[0];
  if (/^50*$/.test(exact.slice(5)) && exact[1] === "." && Number(exact[4]) % 2 === 0) {
    digits = exact.slice(0, 5);
  }
  const exponent = Number(power);
  if (exponent >= -4 && exponent < 4) return String(Number(`${digits}e${exponent}`));
  const sign = exponent < 0 ? "-" : "+";
  return `${Number(digits)}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) {
    count /= 1024;
    unit += 1;
  }
  return `${short(count)} ${units[unit]}`;
}

function secondsText(seconds) {
  if (seconds === 0 || seconds >= 1) return `${short(seconds)} s`;
  return seconds < 1e-3 ? `${short(seconds * 1e6)} µs` : `${short(seconds * 1e3)} ms`;
}

function ratioText(value, least) {
  return least === 0 ? "" : `${(value / least).toFixed(2)}×`;
}

// ---------------------------------------------------------------- what is picked

const mesh = () => tables.meshes[state.mesh];
const tensor = () => mesh().tensors[state.shape];
const entry = (source, target) => tensor().plans[state.links][source][target];
const plansOf = (source, target) => entry(source, target).slice(1).map((moves) => facts(moves, source));
const plan = () => plansOf(state.source, state.target)[state.plan];

function facts(numbers, source) {
  const { moves, seconds, local } = tensor();
  const taken = numbers.map((number) => moves[number]);
  const times = numbers.map((number) => seconds[state.links][number]);
  return {
    moves: taken,
    times,
    specs: [source, ...taken.map((move) => move[MOVE.to])],
    time: times.reduce((sum, time) => sum + time, 0),
    received: taken.reduce((sum, move) => sum + move[MOVE.received], 0),
    peak: taken.reduce((most, move) => Math.max(most, move[MOVE.live]), taken.length ? 0 : local[source]),
  };
}

const kindColor = (kind) => (kind === "exchange" ? "var(--ink)" : tables.colors[kind]);

function escaped(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

const code = (text) => `<code>${escaped(text)}</code>`;

function fill(select, labels, chosen, usable = () => true) {
  select.innerHTML = labels
    .map((label, at) => `<option value="${at}"${usable(at) ? "" : " disabled"}>${escaped(label)}</option>`)
    .join("");
  select.value = String(chosen);
}

function shapeText(sizes) {
  return `${sizes.join("×")} ${tables.dtype}`;
}

// ---------------------------------------------------------------- picking

function pickMesh(number) {
  const before = tables.meshes[state.mesh];
  const [from, to] = [before.tensors[state.shape].specs[state.source], before.tensors[state.shape].specs[state.target]];
  const { name } = before.links[state.links];
  state.mesh = number;
  state.links = Math.max(0, mesh().links.findIndex((link) => link.name === name));
  keepSpecs(from, to);
}

function pickShape(number) {
  const { specs } = tensor();
  const [from, to] = [specs[state.source], specs[state.target]];
  state.shape = number;
  keepSpecs(from, to);
}

function keepSpecs(from, to) {
  // The same specs if they exist, else a conversion with at least one move.
  const { specs } = tensor();
  const last = specs.filter((_, at) => tensor().pending[at].length === 0).length - 1;
  state.source = specs.includes(from) ? specs.indexOf(from) : last;
  state.target = specs.includes(to) ? specs.indexOf(to) : 1;
  pickPlan(0);
}

function pickPlan(number) {
  // Pending sums can be finished, but not started: a target with others is changed.
  if (entry(state.source, state.target) === null) state.target = 0;
  state.plan = number;
  state.at = 0;
  stop();
  render();
}

// ---------------------------------------------------------------- the page around the picture

function render() {
  const here = mesh();
  const { specs } = tensor();
  fill(element("mesh"), tables.meshes.map((each) => each.name), state.mesh);
  fill(element("shape"), here.tensors.map((each) => shapeText(each.shape)), state.shape);
  fill(element("links"), here.links.map((link) => link.name), state.links);
  fill(element("source"), specs, state.source);
  fill(element("target"), specs, state.target, (at) => entry(state.source, at) !== null);
  element("swap").disabled = entry(state.target, state.source) === null;
  renderAnswer();
  renderRoute();
  renderPlans();
  renderMatrix();
  const devices = tensor().boxes[0].length;
  if (state.follow >= devices) state.follow = -1;
  const options = ["all devices", ...Array.from({ length: devices }, (_, at) => `device ${at}`)];
  fill(element("follow"), options, state.follow + 1);
  const link = here.links[state.links];
  element("assumed").innerHTML =
    `Mesh ${escaped(here.name)}, ${escaped(shapeText(tensor().shape))}, ${bytesText(tensor().bytes)}. ` +
    `Ring model; ${escaped(link.text)}. Accuracy: ${escaped(link.error)}.`;
  setUpPicture();
  const words = { mesh: here.name, shape: tensor().shape.join("x"), links: here.links[state.links].name,
    from: specs[state.source], to: specs[state.target], plan: state.plan };
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}

function renderAnswer() {
  const { specs } = tensor();
  const all = plansOf(state.source, state.target);
  const now = all[state.plan];
  const naive = all[entry(state.source, state.target)[0]];
  element("headline").innerHTML =
    `${code(specs[state.source])} → ${code(specs[state.target])} ` +
    (now.moves.length === 0 ? "is the same layout" : `by ${now.moves.map((move) => escaped(move[MOVE.text])).join(", then ")}`);
  const show = (name, text) => { document.querySelector(`[data-fact=${name}]`).innerHTML = text; };
  show("time", secondsText(now.time));
  show("received", bytesText(now.received));
  show("peak", bytesText(now.peak));
  show("naive", secondsText(naive.time) + (now.time > 0 ? ` <small>${ratioText(naive.time, now.time)}</small>` : ""));
}

function renderRoute() {
  const { specs } = tensor();
  const now = plan();
  const parts = [`<li><button type="button" class="at" data-at="0">${escaped(specs[state.source])}</button></li>`];
  now.moves.forEach((move, at) => {
    parts.push(
      `<li><button type="button" class="step" data-play="${at}" style="--kind:${kindColor(move[MOVE.kind])}">` +
      `<span>${escaped(move[MOVE.text])}</span><small>${secondsText(now.times[at])} · receives ` +
      `${bytesText(move[MOVE.received])} · holds ${bytesText(move[MOVE.live])}</small></button></li>` +
      `<li><button type="button" class="at" data-at="${at + 1}">${escaped(specs[move[MOVE.to]])}</button></li>`,
    );
  });
  element("route").innerHTML = parts.join("");
}

function renderPlans() {
  const { specs } = tensor();
  const naive = entry(state.source, state.target)[0];
  const all = plansOf(state.source, state.target);
  const most = (key) => Math.max(...all.map((each) => each[key]), 1e-30);
  const number = (key, text, value) =>
    `<td class="n">${text}<span class="bar" style="width:${(100 * value) / most(key)}%"></span></td>`;
  document.querySelector("#plans tbody").innerHTML = all
    .map((each, at) => {
      const name = (at === 0 ? "cheapest" : `${at + 1}.`) + (at === naive ? " (naive)" : "");
      const steps = each.moves.map((move) =>
        `<span class="kind" style="--kind:${kindColor(move[MOVE.kind])}"></span>${escaped(move[MOVE.text])}`);
      const through = each.specs.slice(1, -1).map((spec) => `<span class="spec">${escaped(specs[spec])}</span>`);
      return (
        `<tr class="${at === state.plan ? "picked" : ""}"><td><label><input type="radio" name="plan" ` +
        `value="${at}"${at === state.plan ? " checked" : ""}>${name}</label></td>` +
        `<td>${steps.join("<br>") || "nothing to do"}</td><td>${through.join("<br>")}</td>` +
        number("time", secondsText(each.time), each.time) +
        `<td class="n">${ratioText(each.time, all[0].time)}</td>` +
        number("received", bytesText(each.received), each.received) +
        number("peak", bytesText(each.peak), each.peak) + "</tr>"
      );
    })
    .join("");
}

function renderMatrix() {
  const { specs } = tensor();
  const size = specs.length > 30 ? 8 : 20;
  const named = specs.length <= 30;
  const margin = named ? 7.3 * Math.max(...specs.map((spec) => spec.length)) + 12 : 4;
  const times = specs.map((_, source) =>
    specs.map((_, target) => (entry(source, target) === null ? null : facts(entry(source, target)[1], source).time)));
  const logs = times.flat().filter((time) => time).map(Math.log);
  const [least, most] = [Math.min(...logs), Math.max(...logs)];
  element("range").textContent = logs.length
    ? `from ${secondsText(Math.exp(least))} to ${secondsText(Math.exp(most))}; gray is free` : "";
  const parts = [];
  times.forEach((row, source) => {
    if (named) {
      const middle = margin + source * size + size / 2;
      parts.push(`<text aria-hidden="true" x="${margin - 6}" y="${middle + 4}" text-anchor="end">${escaped(specs[source])}</text>`);
      parts.push(`<text aria-hidden="true" transform="translate(${middle + 4} ${margin - 6}) rotate(-90)">${escaped(specs[source])}</text>`);
    }
    parts.push(`<g role="row" aria-label="from ${escaped(specs[source])}">`);
    row.forEach((time, target) => {
      if (time === null) return;
      const share = time === 0 ? 0 : most === least ? 0.5 : 0.12 + (0.88 * (Math.log(time) - least)) / (most - least);
      const color =
        `light-dark(oklch(${0.955 - 0.6 * share} ${0.13 * share} 255), oklch(${0.27 + 0.5 * share} ${0.13 * share} 255))`;
      const here = source === state.source && target === state.target;
      const says = `${escaped(specs[source])} → ${escaped(specs[target])}: ${secondsText(time)}`;
      parts.push(
        `<rect role="gridcell" tabindex="${here ? 0 : -1}" aria-selected="${here}" aria-label="${says}" ` +
        `data-pair="${source},${target}" x="${margin + target * size}" y="${margin + source * size}" ` +
        `width="${size - 1}" height="${size - 1}" style="fill:${color}"><title>${says}</title></rect>`,
      );
    });
    parts.push("</g>");
  });
  const frame = (name) => `<rect class="${name}" width="${size + 1}" height="${size + 1}"/>`;
  parts.push(frame("here"), frame("looked"));
  const side = margin + specs.length * size + 4;
  const svg = element("matrix");
  svg.setAttribute("viewBox", `0 0 ${side} ${side}`);
  svg.setAttribute("width", side);
  svg.setAttribute("height", side);
  svg.innerHTML = parts.join("");
  put(".here", cellOf(state.source, state.target));
  look(null);
}

const cellOf = (source, target) => document.querySelector(`#matrix [data-pair="${source},${target}"]`);

function put(name, cell) {
  // A frame around a cell, drawn above all cells.
  const frame = document.querySelector(`#matrix ${name}`);
  frame.style.display = cell === null ? "none" : "";
  if (cell !== null) for (const side of ["x", "y"]) frame.setAttribute(side, cell.getAttribute(side) - 1);
}

function look(cell) {
  // Show the conversion at the mouse or the focus.
  put(".looked", cell === document.activeElement ? cell : null);
  element("looked").textContent = cell === null ? "" : cell.getAttribute("aria-label");
}

function wander(cell, key) {
  // To the next cell in a direction; conversions that do not exist have no cell and are skipped.
  const [source, target] = cell.dataset.pair.split(",").map(Number);
  const last = tensor().specs.length - 1;
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key] ?? [0, 0];
  if (key === "Home" || key === "End") {
    const row = [...cell.parentNode.children];
    return row[key === "Home" ? 0 : row.length - 1];
  }
  if (down === 0 && right === 0) return null;
  for (let [i, j] = [source + down, target + right]; Math.min(i, j) >= 0 && Math.max(i, j) <= last; i += down, j += right) {
    const found = cellOf(i, j);
    if (found !== null) return found;
  }
  return cell;
}

// ---------------------------------------------------------------- events

const chosen = (event) => Number(event.target.value);
element("pick").addEventListener("submit", (event) => event.preventDefault());
element("mesh").addEventListener("change", (event) => pickMesh(chosen(event)));
element("shape").addEventListener("change", (event) => pickShape(chosen(event)));
element("links").addEventListener("change", (event) => { state.links = chosen(event); pickPlan(0); });
element("source").addEventListener("change", (event) => { state.source = chosen(event); pickPlan(0); });
element("target").addEventListener("change", (event) => { state.target = chosen(event); pickPlan(0); });
element("swap").addEventListener("click", () => {
  [state.source, state.target] = [state.target, state.source];
  pickPlan(0);
});
element("plans").addEventListener("change", (event) => {
  const number = chosen(event);
  pickPlan(number);
  document.querySelector(`#plans input[value="${number}"]`).focus();
});
const matrix = element("matrix");
const cellAt = (event) => event.target.closest("[data-pair]");
matrix.addEventListener("click", (event) => pickCell(cellAt(event)));
matrix.addEventListener("pointerover", (event) => look(cellAt(event)));
matrix.addEventListener("pointerleave", () => look(null));
matrix.addEventListener("focusin", (event) => look(cellAt(event)));
matrix.addEventListener("focusout", () => look(null));
matrix.addEventListener("keydown", (event) => {
  const cell = cellAt(event);
  if (cell === null || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") pickCell(cell);
  else {
    const next = wander(cell, event.key);
    if (next === null) return;
    // The tab key returns to the same cell.
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  event.preventDefault();
  event.stopPropagation();
});

function pickCell(cell) {
  if (cell === null) return;
  const focused = cell === document.activeElement;
  [state.source, state.target] = cell.dataset.pair.split(",").map(Number);
  pickPlan(0);
  if (focused) cellOf(state.source, state.target).focus({ preventScroll: true });
}

element("route").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button === null) return;
  if (button.dataset.at !== undefined) jump(Number(button.dataset.at));
  else {
    jump(Number(button.dataset.play));
    forward();
  }
});
element("back").addEventListener("click", back);
element("play").addEventListener("click", play);
element("forward").addEventListener("click", forward);
element("position").addEventListener("input", (event) => jump(chosen(event)));
element("follow").addEventListener("change", (event) => { state.follow = chosen(event) - 1; drawPicture(); });
element("picture").addEventListener("click", (event) => {
  const card = event.target.closest("[data-device]");
  if (card === null) return;
  const device = Number(card.dataset.device);
  state.follow = state.follow === device ? -1 : device;
  element("follow").value = String(state.follow + 1);
  drawPicture();
});
document.addEventListener("keydown", (event) => {
  const busy = event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey;
  const act = { ArrowLeft: back, ArrowRight: forward, p: play }[event.key];
  if (busy || act === undefined) return;
  event.preventDefault();
  act();
});

// ---------------------------------------------------------------- from the address, or a start

function start() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const find = (list, value) => Math.max(0, list.findIndex((each) => each === value));
  const devices = tables.meshes.map((each) => each.shape.reduce((product, size) => product * size, 1));
  const largest = devices.indexOf(Math.max(...devices));
  state.mesh = asked.has("mesh") ? find(tables.meshes.map((each) => each.name), asked.get("mesh")) : largest;
  state.shape = find(mesh().tensors.map((each) => each.shape.join("x")), asked.get("shape"));
  const names = mesh().links.map((link) => link.name);
  state.links = asked.has("links") ? find(names, asked.get("links")) : names.length - 1;
  keepSpecs(asked.get("from"), asked.get("to"));
  const plans = entry(state.source, state.target).length - 1;
  if (asked.has("plan")) pickPlan(Math.min(Math.max(0, Number(asked.get("plan")) || 0), plans - 1));
  jump(Number(asked.get("at")) || 0);
}

start();
