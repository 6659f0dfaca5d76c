"use strict";
// The picture of a plan: devices with their boxes, and boxes on the way. The picked conversion and
// the tables are in page.js, which comes after this.

// ---------------------------------------------------------------- the picture

let geometry = null;
const MOST_ARROWS = 120;

function sidesOf(box) {
  return Array.from({ length: box.length / 2 }, (_, dim) => [box[2 * dim], box[2 * dim + 1]]);
}

function shared(one, other) {
  // The overlap of two boxes, or null.
  const box = one.map((end, at) => (at % 2 ? Math.min(end, other[at]) : Math.max(end, other[at])));
  return sidesOf(box).every(([lo, hi]) => lo < hi) ? box : null;
}

function boxText(box) {
  return sidesOf(box).some(([lo, hi]) => lo === hi)
    ? "nothing"
    : `[${sidesOf(box).map(([lo, hi]) => `${lo}:${hi}`).join(", ")}]`;
}

function setUpPicture() {
  // Cells of the tensor end where some box of the plan ends. Their color shows their position.
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
  geometry = { cells: cellsOf(cuts, slabs), flat, rows, columns, slabs, slabWidth, height, across, cards: cardsOf(devices, across, height) };
  const right = Math.max(...geometry.cards.map((card) => card.x)) + Math.max(across, 130) + 30;
  const zoom = Math.min(1.6, (Math.max(...geometry.cards.map((card) => card.y)) + height - 26) / height);
  geometry.whole = { x: right + 24, y: 26, zoom };
  const longest = Math.max(...plan().specs.map((spec) => tensor().specs[spec].length));
  const across2 = right + 24 + Math.max(across * zoom, 7.3 * (longest + 14)) + 16;
  const down = Math.max(...geometry.cards.map((card) => card.y + height + 34), 26 + height * zoom + 34);
  const svg = element("picture");
  svg.setAttribute("viewBox", `0 0 ${across2} ${down}`);
  svg.setAttribute("width", across2);
  svg.setAttribute("height", down);
  svg.innerHTML =
    `<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
    `<line class="hatch" x1="0" y1="0" x2="0" y2="7"/></pattern>` +
    `<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">` +
    `<path class="head" d="M0 0 8 4 0 8z"/></marker><g id="field">${colored(geometry.cells)}</g></defs>` +
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
  // The place of a box in a card: one rectangle, or for three dims one in each slab of the first.
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

function cellsOf(cuts, slabs) {
  // Hue by the row, lightness by the column.
  const flat = cuts.length === 1;
  const spans = (ends) => ends.slice(0, -1).map((lo, at) => [lo, ends[at + 1]]);
  const [rows, columns] = [flat ? [[0, 1]] : spans(cuts[cuts.length - 2]), spans(cuts[cuts.length - 1])];
  return slabs.flatMap((slab, depth) => rows.flatMap((row, i) => columns.map((column, j) => {
    const along = flat ? j / columns.length : (i + depth / slabs.length) / rows.length;
    const beside = flat || columns.length === 1 ? 0.5 : j / (columns.length - 1);
    const hue = (25 + 330 * along) % 360;
    return {
      box: [...(cuts.length === 3 ? slab : []), ...(flat ? [] : row), ...column],
      color: `light-dark(oklch(${0.9 - 0.26 * beside} 0.115 ${hue}), oklch(${0.78 - 0.3 * beside} 0.11 ${hue}))`,
    };
  })));
}

function colored(cells) {
  return cells.flatMap(({ box, color }) => rectsOf(box).map(({ x, y, w, h }) =>
    `<rect x="${x}" y="${y}" width="${w}" height="${h}" style="fill:${color};stroke:var(--card);stroke-width:.6"/>`))
    .join("");
}

function piece(box, pending) {
  // Boxes of a plan end where cells do, so that a cell lies in a box or beside it.
  const inside = (cell) => cell.box.every((end, at) => (at % 2 ? end <= box[at] : end >= box[at]));
  return colored(geometry.cells.filter(inside)) + rectsOf(box)
    .map(({ x, y, w, h }) =>
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
    boxes[move[MOVE.from]].forEach((held, from) => {
      // A bit for each sender; JavaScript's shifts would treat that of device 31 as a sign.
      if (Math.floor(senders / 2 ** from) % 2 === 0) return;
      const box = shared(held, boxes[move[MOVE.to]][to]);
      if (box !== null) pieces.push({ from, to, box });
    });
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
  // The whole tensor, with the devices of each box in it; joined by a + for a pending sum.
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
    const room = Math.min(13, (w * zoom) / (0.62 * text.length), (h * zoom) / 1.15);
    const size = Math.max(6, room) / zoom;
    const frame =
      `<rect class="${followed ? "edge bold" : "edge"}" x="${left}" y="${top}" width="${w}" height="${h}"/>`;
    // Rows too low for text have none: the devices are listed below each card.
    return room < 5 ? frame : (
      `${frame}<text class="ids" style="font-size:${size}px" x="${left + w / 2}" y="${top + h / 2 + size * 0.35}" ` +
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

function shownPieces(move) {
  // The boxes with an arrow: all that move, or those that one device sends and receives; if there
  // are too many, only those of the first device.
  const traveling = piecesOf(move).filter(({ from, to }) => from !== to);
  const crowded = state.follow < 0 && traveling.length > MOST_ARROWS;
  const one = crowded ? 0 : state.follow;
  const shown = traveling.filter(({ from, to }) => one < 0 || [from, to].includes(one));
  return { shown, crowded, count: traveling.length };
}

function arrows(move) {
  const center = (device, box) => {
    const { x, y, w, h } = rectsOf(box)[0];
    return [geometry.cards[device].x + x + w / 2, geometry.cards[device].y + y + h / 2];
  };
  const { shown } = shownPieces(move);
  const faint = shown.length > 24 ? 0.28 : 0.8;
  return shown
    .map(({ from, to, box }) => {
      const [[x1, y1], [x2, y2]] = [center(from, box), center(to, box)];
      // Bent, so that both directions are visible.
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
    const { crowded, count } = move ? shownPieces(move) : {};
    element("moved").textContent = !move ? ""
      : crowded ? `${count} boxes move; arrows are those of device 0 alone. Pick another to see its own.`
      : "Pick a device to see what it sends and receives alone.";
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

// ---------------------------------------------------------------- animation

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
      // With reduced motion: one layout after the other.
      if (passed >= 1) {
        running.last = time;
        state.at = Math.min(Math.floor(state.at) + 1, until);
      }
    } else {
      running.last = time;
      // After a pause of the browser, continue from the same position.
      state.at = Math.min(state.at + Math.min(Math.max(passed, 0), 0.1), until);
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

