// The editor of the Segment tab: names of classes, strokes with a round brush, regions that the server proposes for a
// box or click, and predicted labels below them.
// `element`, `props`, `trigger` and `watch` are variables of gr.HTML. Labels are sent as runs: label, length, ...

const NONE = 255;
const UNDO_STEPS = 30;
const PAINTED_ALPHA = 215;
const PREDICTED_ALPHA = 120;
const PROPOSED_ALPHA = 190;
const CLICK = 4; // pixels of the picture that a click may move; a longer movement is a box

const part = (name) => element.querySelector(`.painter-${name}`);
const stage = part("stage"), picture = part("picture"), canvas = part("canvas"), brush = part("brush"), frame = part("box");
const context = canvas.getContext("2d");

let shown = { key: null, classes: [] }; // what the server sent last
let painted = new Uint8Array(0), predicted = null, pixels = null;
let undo = [], changed = false, time = 0, erasing = false, adding = false, showing = true, chosen = 0, last = null;
let marking = false, corner = null, proposed = null, number = 0; // the proposal that answers the last mark

function toRuns(labels) {
  const runs = [];
  for (let start = 0, end = 1; start < labels.length; end++) {
    if (end === labels.length || labels[end] !== labels[start]) {
      runs.push(labels[start], end - start);
      start = end;
    }
  }
  return runs;
}

function fromRuns(runs) {
  const labels = new Uint8Array(shown.width * shown.height);
  for (let i = 0, at = 0; i < runs.length; i += 2) labels.fill(runs[i], at, (at += runs[i + 1]));
  return labels;
}

// ------------------------------------------------------------------------------------------------ drawing

function colourPixel(index) {
  if (proposed?.[index]) {
    const column = index % shown.width;
    const isInside = column > 0 && column < shown.width - 1 && proposed[index - 1] && proposed[index + 1] &&
      proposed[index - shown.width] && proposed[index + shown.width];
    const colour = isInside && !erasing ? shown.classes[chosen].colour : [255, 255, 255];
    pixels.data.set([...colour, isInside ? PROPOSED_ALPHA : 255], 4 * index);
    return;
  }
  const isPainted = painted[index] !== NONE;
  const label = isPainted ? painted[index] : predicted && showing ? predicted[index] : NONE;
  const colour = shown.classes[label]?.colour ?? [0, 0, 0];
  pixels.data.set([...colour, label === NONE ? 0 : isPainted ? PAINTED_ALPHA : PREDICTED_ALPHA], 4 * index);
}

function drawAll() {
  if (!pixels) return;
  for (let index = 0; index < painted.length; index++) colourPixel(index);
  context.putImageData(pixels, 0, 0);
}

function stamp(x, y) {
  const radius = part("size").value / 2, label = erasing ? NONE : chosen;
  const left = Math.max(0, Math.ceil(x - radius)), right = Math.min(shown.width - 1, Math.floor(x + radius));
  const top = Math.max(0, Math.ceil(y - radius)), bottom = Math.min(shown.height - 1, Math.floor(y + radius));
  for (let row = top; row <= bottom; row++) {
    for (let column = left; column <= right; column++) {
      if ((row - y) ** 2 + (column - x) ** 2 > radius ** 2) continue;
      painted[row * shown.width + column] = label;
      colourPixel(row * shown.width + column);
    }
  }
}

function stroke(to) {
  const from = last ?? to;
  const steps = Math.max(1, Math.ceil((4 * Math.hypot(to.x - from.x, to.y - from.y)) / part("size").value));
  for (let step = 1; step <= steps; step++) {
    stamp(from.x + ((to.x - from.x) * step) / steps, from.y + ((to.y - from.y) * step) / steps);
  }
  last = to;
  context.putImageData(pixels, 0, 0);
}

// ------------------------------------------------------------------------------------------------ proposals

function showFrame(from, to) {
  const percent = (value, side) => `${Math.min(100, Math.max(0, ((value + 0.5) / side) * 100))}%`;
  Object.assign(frame.style, {
    left: percent(Math.min(from.x, to.x), shown.width),
    top: percent(Math.min(from.y, to.y), shown.height),
    right: `calc(100% - ${percent(Math.max(from.x, to.x), shown.width)})`,
    bottom: `calc(100% - ${percent(Math.max(from.y, to.y), shown.height)})`,
  });
  frame.hidden = false;
}

function mark(from, to) {
  const isClick = Math.hypot(to.x - from.x, to.y - from.y) < CLICK;
  const box = [Math.min(from.x, to.x), Math.min(from.y, to.y), Math.max(from.x, to.x), Math.max(from.y, to.y)];
  if (isClick) frame.hidden = true;
  number += 1;
  trigger("propose", { key: shown.key, number, corners: (isClick ? [from.x, from.y] : box).map((each) => each + 0.5) });
}

function receiveProposal(value) {
  if (value.key !== shown.key || value.number !== number) return; // marked again, or dropped
  proposed = fromRuns(value.proposed).map((label) => Number(label !== NONE));
  drawAll();
  update();
}

function drop() {
  number += 1;
  frame.hidden = true;
  if (!proposed) return;
  proposed = null;
  drawAll();
  update();
}

function accept() {
  remember();
  for (let index = 0; index < painted.length; index++) if (proposed[index]) painted[index] = erasing ? NONE : chosen;
  drop();
  send();
}

function position(event) {
  const place = canvas.getBoundingClientRect();
  const scale = shown.width / place.width;
  return { x: (event.clientX - place.left) * scale - 0.5, y: (event.clientY - place.top) * scale - 0.5 };
}

// ------------------------------------------------------------------------------------------------ state

function remember() {
  undo.push(painted.slice());
  if (undo.length > UNDO_STEPS) undo.shift();
}

function send() {
  changed = true;
  time = Date.now();
  update();
  request("draw");
}

// The time lets the server ignore a painting that arrives after a later one.
function request(name) {
  trigger(name, { key: shown.key, time, runs: toRuns(painted) });
}

function update() {
  part("undo").disabled = !undo.length;
  part("rename").disabled = !shown.classes.length;
  part("erase").setAttribute("aria-pressed", erasing);
  part("region").setAttribute("aria-pressed", marking);
  part("proposal").hidden = !proposed;
  part("show").disabled = !predicted;
  part("show").setAttribute("aria-pressed", showing);
  part("confirm").disabled = !changed;
  part("next").textContent = changed ? "Confirm, next picture →" : "Next picture →";
  part("classes").querySelectorAll("button").forEach((button, index) => {
    button.setAttribute("aria-pressed", index === chosen && !erasing);
  });
}

function choose(index) {
  if (index >= shown.classes.length) return;
  [chosen, erasing] = [index, false];
  if (proposed) drawAll();
  update();
}

function listClasses() {
  part("classes").replaceChildren(
    ...shown.classes.map(({ name, colour }, index) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      button.type = "button";
      if (index < 9) button.title = `Key ${index + 1}`;
      swatch.className = "painter-swatch";
      swatch.style.background = `rgb(${colour})`;
      button.append(swatch, name);
      button.addEventListener("click", () => choose(index));
      return button;
    }),
  );
}

function receive() {
  if (props.value?.proposed) return receiveProposal(props.value);
  const before = shown;
  shown = props.value ?? { key: null, classes: [] };
  if (adding && shown.classes.length > before.classes.length) [chosen, erasing] = [shown.classes.length - 1, false];
  adding = false;
  listClasses();
  stage.hidden = shown.key === null;
  part("caption").textContent = shown.name ?? "";
  if (shown.key !== null) {
    const isOther = shown.key !== before.key;
    if (isOther) load();
    changed = shown.changed || time > shown.time; // painted since the request
    predicted = shown.predicted && fromRuns(shown.predicted);
    drawAll();
    if (before.key !== null && shown.opened !== before.opened) reveal();
  }
  update();
}

function load() {
  picture.src = shown.image;
  picture.alt = `The picture ${shown.name}`;
  [canvas.width, canvas.height] = [shown.width, shown.height];
  stage.style.width = `min(100%, ${(70 * shown.width) / shown.height}vh)`;
  painted = fromRuns(shown.painted);
  proposed = corner = null;
  frame.hidden = true;
  pixels = context.createImageData(shown.width, shown.height);
  time = shown.time;
  undo = [];
}

function reveal() {
  const editor = element.querySelector(".painter"), top = editor.getBoundingClientRect().top;
  if (top < 0 || top > innerHeight / 2) editor.scrollIntoView();
}

// ------------------------------------------------------------------------------------------------ input

canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  if (!shown.classes.length) {
    part("under").textContent = "Name a class first";
    part("name").focus();
    event.preventDefault(); // of the focus of the canvas
    return;
  }
  canvas.setPointerCapture(event.pointerId);
  if (marking) {
    drop();
    corner = position(event);
    return;
  }
  drop();
  remember();
  last = null;
  stroke(position(event));
});

canvas.addEventListener("pointermove", (event) => {
  const to = position(event);
  const width = canvas.getBoundingClientRect().width, side = (part("size").value * width) / shown.width;
  Object.assign(brush.style, { width: `${side}px`, height: `${side}px` });
  Object.assign(brush.style, { left: `${((to.x + 0.5) / shown.width) * 100}%`, top: `${((to.y + 0.5) / shown.height) * 100}%` });
  brush.hidden = marking;
  if (corner) showFrame(corner, to);
  if (last) {
    const moves = event.getCoalescedEvents?.() ?? []; // between two frames; missing in some browsers
    for (const move of moves.length ? moves : [event]) stroke(position(move));
  }
  const index = Math.floor(to.y + 0.5) * shown.width + Math.floor(to.x + 0.5);
  const label = painted[index] !== NONE ? painted[index] : predicted?.[index];
  part("under").textContent = shown.classes[label]?.name ?? "";
});

canvas.addEventListener("pointerleave", () => (brush.hidden = true));

for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, (event) => {
    if (last) send();
    if (corner && end === "pointerup") mark(corner, position(event));
    else if (corner) drop();
    last = corner = null;
  });
}

part("region").addEventListener("click", () => {
  marking = !marking;
  drop();
  update();
});

part("accept").addEventListener("click", accept);
part("drop").addEventListener("click", drop);

part("erase").addEventListener("click", () => {
  erasing = !erasing;
  if (proposed) drawAll();
  update();
});

part("undo").addEventListener("click", () => {
  drop();
  painted = undo.pop() ?? painted;
  drawAll();
  send();
});

part("clear").addEventListener("click", () => {
  drop();
  remember();
  painted.fill(NONE);
  drawAll();
  send();
});

part("show").addEventListener("click", () => {
  showing = !showing;
  drawAll();
  update();
});

part("confirm").addEventListener("click", () => request("confirm"));
part("next").addEventListener("click", () => request("next"));

part("add").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = part("name").value.trim();
  if (!name) return;
  const names = shown.classes.map((each) => each.name);
  part("name").value = "";
  if (names.includes(name)) return choose(names.indexOf(name));
  adding = true;
  trigger("classes", { names: [...names, name] });
});

part("rename").addEventListener("click", () => {
  const names = shown.classes.map((each) => each.name);
  const name = prompt("Name of the class", names[chosen]);
  if (name !== null) trigger("classes", { names: names.with(chosen, name) });
});

element.addEventListener("keydown", (event) => {
  if (event.target.type === "text" || event.target.type === "range") return;
  if ((event.ctrlKey || event.metaKey) && event.key === "z") part("undo").click();
  else if (event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "e") part("erase").click();
  else if (/^[1-9]$/.test(event.key)) choose(event.key - 1);
  else if (event.key === "b") part("region").click();
  else if (event.key === "Escape" && (proposed || !frame.hidden)) drop();
  else if (event.key === "Enter" && event.target === canvas && proposed) accept();
  else if (event.key === "Enter" && event.target === canvas) part("confirm").click();
  else return;
  event.preventDefault();
});

watch("value", receive);
receive();
