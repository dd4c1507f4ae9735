// Draws all charts in the colours of the page's theme, along the chosen x axis; again whenever one of these changes.
const specs = JSON.parse(document.getElementById("specs").textContent);
const settings = JSON.parse(document.getElementById("settings").textContent);
const themeChoice = document.getElementById("theme");
const axisChoice = document.getElementById("axis");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const views = new Map();

// Some browsers keep no storage for pages that are files.
function remembered() { try { return localStorage.getItem("mpitrain-theme") || "auto"; } catch { return "auto"; } }
function remember(choice) { try { localStorage.setItem("mpitrain-theme", choice); } catch { /* not kept */ } }

function theme() {
  return themeChoice.value === "auto" ? (system.matches ? "dark" : "light") : themeChoice.value;
}

// Where names of runs and metrics stand is no colour, whatever they begin with.
function painted(node, colours) {
  if (typeof node === "string") return node.startsWith("@") ? colours[node.slice(1)] ?? node : node;
  if (node === null || typeof node !== "object") return node;
  if (Array.isArray(node)) return node.map((part) => painted(part, colours));
  const parts = Object.entries(node).map(([key, value]) => [
    key, settings.foreign.includes(key) ? structuredClone(value) : painted(value, colours),
  ]);
  return Object.fromEntries(parts);
}

// Puts time or samples in the place of steps, wherever a chart has steps along x.
function along(node, choice) {
  if (Array.isArray(node)) { node.forEach((part) => along(part, choice)); return; }
  if (node === null || typeof node !== "object") return;
  if (node.encoding && node.encoding.x && node.encoding.x.field === "step") {
    const x = node.encoding.x;
    x.field = choice;
    x.title = choice === "seconds" ? `time in steps (${settings.time.unit})` : "samples seen";
    x.axis = choice === "seconds" ? { labelExpr: `format(datum.value / ${settings.time.size}, '~g')` } : { format: "~s" };
  }
  for (const key of ["layer", "spec", "hconcat", "vconcat", "concat"]) along(node[key], choice);
}

const NARROW = 420;  // pixels of a chart, below which titles and legends would be cut off, as on a phone

// Breaks the title into lines between words.
function fitNarrow(spec, width) {
  if (typeof spec.title !== "string") return;
  const lines = [""];
  for (const word of spec.title.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (longer.length * 8.5 > width - 50) lines.push(word); else lines[lines.length - 1] = longer;
  }
  spec.title = lines;
}

function narrowTheme(theme) {
  const legend = { ...theme.legend, columns: 2, layout: { bottom: { direction: "vertical", anchor: "start" } } };
  const axis = { ...theme.axis, labelOverlap: "greedy", labelSeparation: 8 };
  return { ...theme, axis, title: { ...theme.title, frame: "bounds" }, legend };
}

async function draw(name) {
  const place = document.getElementById(name);
  const colours = settings.colours[theme()];
  const spec = painted(specs[name], colours);
  if (spec.usermeta && spec.usermeta.axes && axisChoice.value !== "step") along(spec, axisChoice.value);
  const narrow = place.clientWidth < NARROW;
  if (narrow) fitNarrow(spec, place.clientWidth);
  if (spec.usermeta && spec.usermeta.columns) {  // panels have no width of the page by themselves
    const columns = narrow ? 1 : spec.usermeta.columns;
    if (spec.columns) spec.columns = columns;
    spec.spec.width = Math.max(200, Math.floor((place.clientWidth - 70 - 24 * (columns - 1)) / columns));
  }
  delete spec.usermeta;
  const earlier = views.get(name);
  if (earlier) earlier.finalize();
  const result = await vegaEmbed(place, spec, {
    config: narrow ? narrowTheme(settings.themes[theme()]) : settings.themes[theme()], renderer: "svg", actions: { export: true, source: false, compiled: false, editor: false },
  });
  views.set(name, result);
}

let drawing = Promise.resolve();
function drawAll() {
  document.documentElement.dataset.theme = theme();
  document.body.dataset.drawn = "no";
  drawing = drawing.then(async () => {
    for (const name of Object.keys(specs)) await draw(name);
    document.body.dataset.drawn = "yes";
  });
}

themeChoice.value = remembered();
themeChoice.addEventListener("change", () => { remember(themeChoice.value); drawAll(); });
axisChoice.addEventListener("change", drawAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (Math.abs(window.innerWidth - width) < 40) return;
  width = window.innerWidth;
  clearTimeout(drawAll.later);
  drawAll.later = setTimeout(drawAll, 300);
});
system.addEventListener("change", () => { if (themeChoice.value === "auto") drawAll(); });
drawAll();
