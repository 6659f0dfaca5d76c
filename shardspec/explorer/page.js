"use strict";
// The tables are made by shardspec/explorer/tables.py, which says what stands in them. Nothing here
// computes a price: prices of plans are sums of those of their moves, in the order of the moves.

const tables = JSON.parse(document.getElementById("tables").textContent);
const element = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const state = { mesh: 0, shape: 0, links: 0, source: 0, target: 0, plan: 0, at: 0, follow: -1 };
const MOVE = { from: 0, to: 1, kind: 2, text: 3, received: 4, live: 5, senders: 6 };
const STEP_MS = 1800;

// ---------------------------------------------------------------- numbers as the library shows them

function short(value) {
  // Like "%.4g": four digits, ties to the even one, zeros at the end left out.
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

const kindColour = (kind) => (kind === "exchange" ? "var(--ink)" : tables.colours[kind]);

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
  // The same specs where there are such, else a conversion that has something to show.
  const { specs } = tensor();
  const last = specs.filter((_, at) => tensor().pending[at].length === 0).length - 1;
  state.source = specs.includes(from) ? specs.indexOf(from) : last;
  state.target = specs.includes(to) ? specs.indexOf(to) : 1;
  pickPlan(0);
}

function pickPlan(number) {
  // What is pending can be finished, but not started: a target that asks for that is changed.
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
    `Ring model; ${escaped(link.text)}. Known error of such times: ${escaped(link.error)}.`;
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
      `<li><button type="button" class="step" data-play="${at}" style="--kind:${kindColour(move[MOVE.kind])}">` +
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
        `<span class="kind" style="--kind:${kindColour(move[MOVE.kind])}"></span>${escaped(move[MOVE.text])}`);
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
    ? `from ${secondsText(Math.exp(least))} to ${secondsText(Math.exp(most))}; grey is free` : "";
  const parts = [];
  times.forEach((row, source) => {
    if (named) {
      const middle = margin + source * size + size / 2;
      parts.push(`<text x="${margin - 6}" y="${middle + 4}" text-anchor="end">${escaped(specs[source])}</text>`);
      parts.push(`<text transform="translate(${middle + 4} ${margin - 6}) rotate(-90)">${escaped(specs[source])}</text>`);
    }
    row.forEach((time, target) => {
      if (time === null) return;
      const share = time === 0 ? 0 : most === least ? 0.5 : 0.12 + (0.88 * (Math.log(time) - least)) / (most - least);
      const colour =
        `light-dark(oklch(${0.955 - 0.6 * share} ${0.13 * share} 255), oklch(${0.27 + 0.5 * share} ${0.13 * share} 255))`;
      parts.push(
        `<rect data-pair="${source},${target}" x="${margin + target * size}" y="${margin + source * size}" ` +
        `width="${size - 1}" height="${size - 1}" style="fill:${colour}"><title>${escaped(specs[source])} → ` +
        `${escaped(specs[target])}: ${secondsText(time)}</title></rect>`,
      );
    });
  });
  parts.push(
    `<rect class="here" x="${margin + state.target * size - 1}" y="${margin + state.source * size - 1}" ` +
    `width="${size + 1}" height="${size + 1}"/>`,
  );
  const side = margin + specs.length * size + 4;
  const svg = element("matrix");
  svg.setAttribute("viewBox", `0 0 ${side} ${side}`);
  svg.setAttribute("width", side);
  svg.setAttribute("height", side);
  svg.innerHTML = parts.join("");
}

// ---------------------------------------------------------------- the picture

let geometry = null;

function sidesOf(box) {
  return Array.from({ length: box.length / 2 }, (_, dim) => [box[2 * dim], box[2 * dim + 1]]);
}

function shared(one, other) {
  // What two boxes have in common, or null.
  const box = one.map((end, at) => (at % 2 ? Math.min(end, other[at]) : Math.max(end, other[at])));
  return sidesOf(box).every(([lo, hi]) => lo < hi) ? box : null;
}

function boxText(box) {
  return sidesOf(box).some(([lo, hi]) => lo === hi)
    ? "nothing"
    : `[${sidesOf(box).map(([lo, hi]) => `${lo}:${hi}`).join(", ")}]`;
}

function setUpPicture() {
  // Cells of the tensor end where some box of the plan ends. Their colour says where they are from.
  const { shape, boxes } = tensor();
  const cuts = shape.map((size, dim) => {
    const ends = new Set([0, size]);
    plan().specs.forEach((spec) => boxes[spec].forEach((box) => ends.add(box[2 * dim]).add(box[2 * dim + 1])));
    return [...ends].sort((a, b) => a - b);
  });
  const flat = shape.length === 1;
  const [rows, columns] = flat ? [1, shape[0]] : shape.slice(-2);
  const ratio = Math.min(1.8, Math.max(0.55, columns / rows));
  const devices = boxes[0].length;
  const perRow = Math.min(mesh().shape.length === 1 ? devices : mesh().shape.slice(-1)[0], 8);
  const unit = Math.min(150, Math.max(devices > 16 ? 74 : 96, (700 / perRow - 34) / Math.sqrt(ratio)));
  const slabs = shape.length === 3 ? cuts[0].slice(0, -1).map((lo, at) => [lo, cuts[0][at + 1]]) : [[0, 1]];
  const width = unit * Math.sqrt(ratio);
  const height = flat ? 34 : unit / Math.sqrt(ratio);
  const slabWidth = slabs.length > 1 ? width * 0.62 : width;
  const across = slabs.length * slabWidth + (slabs.length - 1) * 5;
  geometry = { cuts, flat, rows, columns, slabs, slabWidth, height, across, cards: cardsOf(devices, across, height) };
  const right = Math.max(...geometry.cards.map((card) => card.x)) + Math.max(across, 130) + 30;
  const zoom = Math.min(1.6, (Math.max(...geometry.cards.map((card) => card.y)) + height - 26) / height);
  geometry.whole = { x: right + 24, y: 26, zoom };
  const across2 = right + 24 + across * zoom + 16;
  const down = Math.max(...geometry.cards.map((card) => card.y + height + 34), 26 + height * zoom + 34);
  const svg = element("picture");
  svg.setAttribute("viewBox", `0 0 ${across2} ${down}`);
  svg.setAttribute("width", across2);
  svg.setAttribute("height", down);
  svg.innerHTML =
    `<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
    `<line class="hatch" x1="0" y1="0" x2="0" y2="7"/></pattern>` +
    `<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">` +
    `<path class="head" d="M0 0 8 4 0 8z"/></marker><g id="field">${field()}</g></defs>` +
    `<line class="rule" x1="${right}" y1="12" x2="${right}" y2="${down - 12}"/>` +
    `<g id="together"></g><g id="still"></g><g id="moving"></g><g id="arrows"></g>`;
  element("position").max = String(Math.max(plan().moves.length, 0.01));
  drawPicture(true);
}

function cardsOf(devices, across, height) {
  // Rows and columns are the last two axes of the mesh; further axes put such grids side by side.
  const { shape } = mesh();
  const letters = 4 + tensor().shape.reduce((sum, size) => sum + 2 * String(size).length + 3, -2);
  const [dx, dy] = [Math.max(across + 34, 6.7 * letters), height + 56];
  const columns = shape.length === 1 ? Math.min(shape[0], 8) : shape[shape.length - 1];
  const rows = shape.length === 1 ? Math.ceil(devices / columns) : shape[shape.length - 2];
  return Array.from({ length: devices }, (_, device) => {
    const at = [];
    shape.reduceRight((left, size) => (at.unshift(left % size), Math.floor(left / size)), device);
    const grid = Math.floor(device / (rows * columns));
    const beside = columns <= 4;
    return {
      x: 14 + (device % columns) * dx + (beside ? grid * (columns * dx + 26) : 0),
      y: 26 + (Math.floor(device / columns) % rows) * dy + (beside ? 0 : grid * (rows * dy + 20)),
      name: shape.length > 1 ? `${device}  (${at.join(",")})` : String(device),
    };
  });
}

function rectsOf(box) {
  // Where a box lies in a card: one rectangle, or for three dims one in each slab of the first.
  const { flat, rows, columns, slabs, slabWidth, height } = geometry;
  const sides = sidesOf(box);
  const [[top, bottom], [left, right]] = flat ? [[0, 1], sides[0]] : sides.slice(-2);
  return slabs
    .map(([lo, hi], at) => ({ lo, hi, x: at * (slabWidth + 5) }))
    .filter(({ lo, hi }) => sides.length < 3 || (sides[0][0] <= lo && hi <= sides[0][1]))
    .map(({ x }) => ({
      x: x + (slabWidth * left) / columns,
      y: (height * top) / rows,
      w: (slabWidth * (right - left)) / columns,
      h: (height * (bottom - top)) / rows,
    }))
    .filter(({ w, h }) => w > 0 && h > 0);
}

function field() {
  // Hue by the row, lightness by the column.
  const { cuts, flat, slabs } = geometry;
  const down = flat ? [0, 1] : cuts[cuts.length - 2];
  const right = cuts[cuts.length - 1];
  const parts = [];
  const spans = (ends) => ends.slice(0, -1).map((lo, at) => [lo, ends[at + 1]]);
  const [rows, columns] = [spans(down), spans(right)];
  slabs.forEach((slab, depth) => rows.forEach((row, i) => columns.forEach((column, j) => {
    const box = [...(cuts.length === 3 ? slab : []), ...(flat ? [] : row), ...column];
    const along = flat ? j / columns.length : (i + depth / slabs.length) / rows.length;
    const beside = flat || columns.length === 1 ? 0.5 : j / (columns.length - 1);
    const hue = (25 + 330 * along) % 360;
    const colour =
      `light-dark(oklch(${0.9 - 0.26 * beside} 0.115 ${hue}), oklch(${0.78 - 0.3 * beside} 0.11 ${hue}))`;
    rectsOf(box).forEach(({ x, y, w, h }) =>
      parts.push(`<rect x="${x}" y="${y}" width="${w}" height="${h}" style="fill:${colour};stroke:var(--card);stroke-width:.6"/>`));
  })));
  return parts.join("");
}

function piece(box, pending) {
  return rectsOf(box)
    .map(({ x, y, w, h }) =>
      `<svg x="${x}" y="${y}" width="${w}" height="${h}" viewBox="${x} ${y} ${w} ${h}"><use href="#field"/></svg>` +
      (pending ? `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="url(#stripes)"/>` : "") +
      `<rect class="edge" x="${x}" y="${y}" width="${w}" height="${h}"/>`)
    .join("");
}

function outline(box, kind) {
  return rectsOf(box).map(({ x, y, w, h }) =>
    `<rect class="${kind}" x="${x}" y="${y}" width="${w}" height="${h}"/>`).join("");
}

function piecesOf(move) {
  // Every part that a device holds after a move, with the device it comes from.
  const { boxes } = tensor();
  const pieces = [];
  move[MOVE.senders].forEach((senders, to) => {
    for (let from = 0; senders >> from; from += 1) {
      if ((senders >> from) & 1) {
        const box = shared(boxes[move[MOVE.from]][from], boxes[move[MOVE.to]][to]);
        if (box !== null) pieces.push({ from, to, box });
      }
    }
  });
  return pieces;
}

let drawn = "";

function drawPicture(anew = false) {
  const now = plan();
  const { boxes, pending, shape } = tensor();
  const step = Math.min(Math.floor(state.at), now.moves.length);
  const part = state.at - step;
  const move = now.moves[step];
  const busy = part > 0;
  const key = `${step} ${busy} ${state.follow}`;
  const spec = now.specs[step];
  if (anew || key !== drawn) {
    drawn = key;
    const whole = shape.flatMap((size) => [0, size]);
    element("still").innerHTML = geometry.cards.map((card, device) => {
      const box = boxes[spec][device];
      const held = busy ? `<g class="fading">${piece(box, pending[spec].length)}</g>` : piece(box, pending[spec].length);
      const wanted = move ? outline(boxes[move[MOVE.to]][device], "wanted") : "";
      return (
        `<g class="device${state.follow === device ? " followed" : ""}" data-device="${device}" ` +
        `transform="translate(${card.x} ${card.y})"><rect class="frame" x="-9" y="-21" rx="7" ` +
        `width="${geometry.across + 18}" height="${geometry.height + 45}"/>` +
        `<text x="0" y="-7">${card.name}</text>${outline(whole, "whole")}${held}${wanted}` +
        `<text class="soft" x="0" y="${geometry.height + 15}">${boxText(box)}</text></g>`
      );
    }).join("");
    element("together").innerHTML = together(spec);
    const pieces = busy ? piecesOf(move) : [];
    const reducing = move !== undefined && pending[move[MOVE.from]].length > pending[move[MOVE.to]].length;
    element("moving").innerHTML = pieces
      .map(({ from, to, box }) => `<g data-from="${from}" data-to="${to}">${piece(box, reducing || pending[spec].length)}</g>`)
      .join("");
    element("arrows").innerHTML = move && !busy ? arrows(move) : "";
    describe(now, step, move);
  }
  const eased = part * part * (3 - 2 * part);
  for (const group of element("moving").children) {
    const [from, to] = [geometry.cards[group.dataset.from], geometry.cards[group.dataset.to]];
    const [x, y] = [from.x + (to.x - from.x) * eased, from.y + (to.y - from.y) * eased];
    group.setAttribute("transform", `translate(${x} ${y})`);
    group.style.opacity = group.dataset.from === group.dataset.to ? 1 : 0.85;
  }
  for (const group of document.querySelectorAll(".fading")) group.style.opacity = 0.75 * (1 - eased);
  element("position").value = String(state.at);
  element("back").disabled = state.at === 0;
  element("forward").disabled = element("play").disabled = now.moves.length === 0;
  if (state.at >= now.moves.length) element("forward").disabled = true;
  for (const button of element("route").querySelectorAll("button")) {
    const current = busy ? button.dataset.play === String(step) : button.dataset.at === String(step);
    if (current) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  }
}

function together(spec) {
  // The whole tensor, and in each box the devices that hold it; those of a pending sum with a +.
  const { boxes, pending, specs } = tensor();
  const { x, y, zoom } = geometry.whole;
  const holders = new Map();
  boxes[spec].forEach((box, device) => {
    const name = box.join();
    holders.set(name, { box, devices: [...(holders.get(name)?.devices ?? []), device] });
  });
  const parts = [...holders.values()].flatMap(({ box, devices }) => rectsOf(box).map(({ x: left, y: top, w, h }) => {
    const followed = devices.includes(state.follow);
    const text = idsText(devices, pending[spec].length ? "+" : ",");
    const size = Math.max(6, Math.min(13, (w * zoom) / (0.62 * text.length), (h * zoom) / 1.15)) / zoom;
    return (
      `<rect class="${followed ? "edge bold" : "edge"}" x="${left}" y="${top}" width="${w}" height="${h}"/>` +
      `<text class="ids" style="font-size:${size}px" x="${left + w / 2}" y="${top + h / 2 + size * 0.35}" ` +
      `text-anchor="middle">${text}</text>`
    );
  }));
  return (
    `<text x="${x}" y="${y - 7}">the tensor as ${escaped(specs[spec])}</text>` +
    `<g transform="translate(${x} ${y}) scale(${zoom})"><use href="#field"/>${parts.join("")}</g>` +
    `<text class="soft" x="${x}" y="${y + geometry.height * zoom + 15}">who holds which part</text>`
  );
}

function idsText(ids, sign) {
  const runs = [];
  for (const id of ids) {
    const last = runs[runs.length - 1];
    if (last && last[last.length - 1] === id - 1) last.push(id);
    else runs.push([id]);
  }
  const far = sign === "+" ? "+…+" : "-";
  return runs.map((each) => (each.length > 2 ? `${each[0]}${far}${each[each.length - 1]}` : each.join(sign))).join(sign);
}

function arrows(move) {
  const centre = (device, box) => {
    const { x, y, w, h } = rectsOf(box)[0];
    return [geometry.cards[device].x + x + w / 2, geometry.cards[device].y + y + h / 2];
  };
  const travelling = piecesOf(move).filter(({ from, to }) => from !== to);
  const shown = travelling.filter(({ from, to }) => state.follow < 0 || [from, to].includes(state.follow));
  const faint = shown.length > 24 ? 0.28 : 0.8;
  return shown
    .map(({ from, to, box }) => {
      const [[x1, y1], [x2, y2]] = [centre(from, box), centre(to, box)];
      // Bent, so that the way there and the way back are two lines.
      const [bx, by] = [(x1 + x2) / 2 - (y2 - y1) * 0.14, (y1 + y2) / 2 + (x2 - x1) * 0.14];
      return `<path class="arrow" style="opacity:${faint}" marker-end="url(#tip)" d="M${x1} ${y1}Q${bx} ${by} ${x2} ${y2}"/>`;
    })
    .join("");
}

function describe(now, step, move) {
  const { specs, boxes, pending } = tensor();
  const spec = now.specs[step];
  const hatched = pending[spec].length ? " Every hatched box is one addend." : "";
  element("caption").innerHTML = move
    ? `Step ${step + 1} of ${now.moves.length}: <strong>${escaped(move[MOVE.text])}</strong>, from ${code(specs[spec])} ` +
      `to ${code(specs[move[MOVE.to]])}; dashed is what a device will hold.${hatched}`
    : `${now.moves.length ? "Arrived: " : ""}this is ${code(specs[spec])}.${hatched}`;
  if (!move || state.follow < 0) {
    element("moved").textContent = move ? "Pick a device to see what it sends and receives alone." : "";
    return;
  }
  const parts = piecesOf(move);
  const list = (items, other) => items.map((item) => `${boxText(item.box)} ${other(item)}`).join(", ") || "nothing";
  const came = parts.filter(({ from, to }) => to === state.follow && from !== to);
  const went = parts.filter(({ from, to }) => from === state.follow && from !== to);
  element("moved").textContent =
    `Device ${state.follow} holds ${boxText(boxes[spec][state.follow])}; it gets ` +
    `${list(came, ({ from }) => `from ${from}`)}; it gives ${list(went, ({ to }) => `to ${to}`)}.`;
}

// ---------------------------------------------------------------- moving on

let running = null;

function stop() {
  if (running !== null) cancelAnimationFrame(running.frame);
  running = null;
  element("play").textContent = "▶ Play";
}

function run(until) {
  stop();
  element("play").textContent = "❚❚ Pause";
  running = { frame: 0, last: performance.now() };
  const tick = (time) => {
    const passed = (time - running.last) / STEP_MS;
    if (still.matches) {
      // No motion wanted: one layout after the other.
      if (passed >= 1) {
        running.last = time;
        state.at = Math.min(Math.floor(state.at) + 1, until);
      }
    } else {
      running.last = time;
      state.at = Math.min(state.at + Math.max(passed, 0), until);
    }
    drawPicture();
    if (state.at >= until) stop();
    else running.frame = requestAnimationFrame(tick);
  };
  running.frame = requestAnimationFrame(tick);
}

function jump(at) {
  stop();
  state.at = Math.min(Math.max(at, 0), plan().moves.length);
  drawPicture();
}

function play() {
  if (running !== null) {
    stop();
    return;
  }
  if (state.at >= plan().moves.length) state.at = 0;
  run(plan().moves.length);
}

const back = () => jump(Math.ceil(state.at) - 1);

function forward() {
  const next = Math.min(Math.floor(state.at) + 1, plan().moves.length);
  if (still.matches) jump(next);
  else if (state.at < next) run(next);
}

// ---------------------------------------------------------------- hands on

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
element("matrix").addEventListener("click", (event) => {
  const cell = event.target.closest("[data-pair]");
  if (cell === null) return;
  [state.source, state.target] = cell.dataset.pair.split(",").map(Number);
  pickPlan(0);
});
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
