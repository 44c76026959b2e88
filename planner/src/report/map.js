// Draws the plan that stands in #data. Top-down: the data, the view, drawing, the pointer, the table.
"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("data").textContent);
  const rects = unpack(plan.rects);
  const aliases = unpack(plan.aliases);
  const load = loads(rects);
  const most = Math.max(plan.makespan, 1);
  const whole = { t0: plan.first, t1: plan.last, a0: 0, a1: most };
  let view = { ...whole };
  let chosen = -1; // the highlighted label
  let hovered = null;

  const canvas = document.getElementById("map");
  const tip = document.getElementById("tip");
  const pen = canvas.getContext("2d", { alpha: false });
  // The plot inside the canvas, in CSS pixels: a strip for the load, then the map.
  const margin = { left: 86, right: 14, top: 20, strip: 64, gap: 24, bottom: 26 };
  let box = {};
  let theme = {};
  let pending = false;

  // ---- the data ----

  // Columns to typed arrays; births and buffer numbers are differences to the row before.
  function unpack(columns) {
    const n = columns.birth.length;
    const out = {
      n,
      birth: new Float64Array(n), death: new Float64Array(n), from: new Float64Array(n), to: new Float64Array(n),
      slot: new Float64Array(n), slack: columns.slack, label: columns.label, lane: columns.lane,
    };
    let birth = 0, slot = 0;
    for (let i = 0; i < n; i++) {
      birth += columns.birth[i];
      slot += columns.slot[i];
      out.birth[i] = birth;
      out.death[i] = birth + columns.life[i];
      out.from[i] = columns.from[i] * plan.unit;
      out.to[i] = out.from[i] + columns.bytes[i] * plan.unit;
      out.slot[i] = slot;
    }
    // Drawing goes label by label, so that the colour changes rarely.
    out.order = Uint32Array.from({ length: n }, (_, i) => i).sort((a, b) => out.label[a] - out.label[b] || a - b);
    return out;
  }

  // The load as steps: from ticks[i] on it is bytes[i].
  function loads(r) {
    const deaths = Uint32Array.from({ length: r.n }, (_, i) => i).sort((a, b) => r.death[a] - r.death[b]);
    const ticks = [plan.first], bytes = [0];
    let now = 0, born = 0, died = 0;
    while (died < r.n) {
      const tick = Math.min(born < r.n ? r.birth[born] : Infinity, r.death[deaths[died]]);
      for (; died < r.n && r.death[deaths[died]] === tick; died++) now -= r.to[deaths[died]] - r.from[deaths[died]];
      for (; born < r.n && r.birth[born] === tick; born++) now += r.to[born] - r.from[born];
      ticks.push(tick);
      bytes.push(now);
    }
    return { ticks, bytes };
  }

  // ---- the view ----

  const xOf = (t) => box.x + ((t - view.t0) / (view.t1 - view.t0)) * box.w;
  const yOf = (a) => box.y + (1 - (a - view.a0) / (view.a1 - view.a0)) * box.h;
  const tickAt = (x) => view.t0 + ((x - box.x) / box.w) * (view.t1 - view.t0);
  const addressAt = (y) => view.a0 + (1 - (y - box.y) / box.h) * (view.a1 - view.a0);

  function clamp(from, to, low, high, least) {
    const span = Math.min(Math.max(to - from, Math.min(least, high - low)), high - low);
    const start = Math.min(Math.max(from, low), high - span);
    return [start, start + span];
  }

  function show(next) {
    const [t0, t1] = clamp(next.t0, next.t1, whole.t0, whole.t1, 4);
    const [a0, a1] = clamp(next.a0, next.a1, whole.a0, whole.a1, 16 * plan.unit);
    view = { t0, t1, a0, a1 };
    redraw();
  }

  // Zooms by a factor about a point of the plot; a factor of 1 leaves that direction as it is.
  function zoom(x, y, factorT, factorA) {
    const t = tickAt(Math.min(Math.max(x, box.x), box.x + box.w));
    const a = addressAt(Math.min(Math.max(y, box.y), box.y + box.h));
    show({
      t0: t - (t - view.t0) * factorT, t1: t + (view.t1 - t) * factorT,
      a0: a - (a - view.a0) * factorA, a1: a + (view.a1 - a) * factorA,
    });
  }

  function pan(dx, dy) {
    const dt = (dx / box.w) * (view.t1 - view.t0), da = (dy / box.h) * (view.a1 - view.a0);
    show({ t0: view.t0 - dt, t1: view.t1 - dt, a0: view.a0 + da, a1: view.a1 + da });
  }

  // ---- drawing ----

  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }

  function resize() {
    const scale = window.devicePixelRatio || 1;
    const w = canvas.clientWidth, h = canvas.clientHeight;
    canvas.width = Math.round(w * scale);
    canvas.height = Math.round(h * scale);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const y = margin.top + margin.strip + margin.gap;
    box = {
      scale, width: w, height: h, x: margin.left, w: Math.max(w - margin.left - margin.right, 10),
      y, h: Math.max(h - y - margin.bottom, 10), stripY: margin.top, stripH: margin.strip,
    };
    redraw();
  }

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "panel", "ink", "soft", "line", "faded", "peak", "curve"]) {
      theme[name] = style.getPropertyValue("--" + name).trim();
    }
    redraw();
  }

  function draw() {
    pen.fillStyle = theme.ground;
    pen.fillRect(0, 0, box.width, box.height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = theme.panel;
    pen.fillRect(box.x, box.stripY, box.w, box.stripH);
    pen.fillRect(box.x, box.y, box.w, box.h);
    drawGrid();
    clipped(box.stripY, box.stripH, drawLoad);
    clipped(box.y, box.h, () => {
      drawRects();
      drawAliases();
      drawArenas();
      if (hovered) outline(hovered.table, hovered.i, 2);
    });
    drawPeak();
    pen.strokeStyle = theme.line;
    pen.lineWidth = 1;
    pen.strokeRect(box.x - 0.5, box.y - 0.5, box.w + 1, box.h + 1);
    pen.strokeRect(box.x - 0.5, box.stripY - 0.5, box.w + 1, box.stripH + 1);
  }

  function clipped(y, h, what) {
    pen.save();
    pen.beginPath();
    pen.rect(box.x, y, box.w, h);
    pen.clip();
    what();
    pen.restore();
  }

  function drawGrid() {
    pen.strokeStyle = theme.line;
    pen.fillStyle = theme.soft;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    const step = powerOfTwo((view.a1 - view.a0) / Math.max(box.h / 60, 2));
    for (const a of marks(view.a0, view.a1, step)) {
      const y = Math.round(yOf(a)) + 0.5;
      line(box.x, y, box.x + box.w, y);
      pen.fillText(address(a, step), box.x - 8, y);
    }
    pen.fillText(human(most), box.x - 8, box.stripY + 6);
    pen.fillText("load", box.x - 8, box.stripY + box.stripH - 7);
    pen.textAlign = "center";
    for (const t of marks(view.t0, view.t1, powerOfTen((view.t1 - view.t0) / Math.max(box.w / 110, 2)))) {
      const x = Math.round(xOf(t)) + 0.5;
      line(x, box.y + box.h, x, box.y + box.h + 4);
      pen.fillText(String(t), Math.min(Math.max(x, box.x + 10), box.x + box.w - 16), box.y + box.h + 15);
    }
  }

  // The greatest load in each pixel column.
  function drawLoad() {
    const { ticks, bytes } = load;
    const columns = Math.ceil(box.w);
    const tops = new Float64Array(columns);
    let i = firstAfter(ticks, view.t0) - 1;
    for (i = Math.max(i, 0); i < ticks.length && ticks[i] < view.t1; i++) {
      const until = i + 1 < ticks.length ? ticks[i + 1] : plan.last;
      const last = Math.min(Math.ceil(xOf(until) - box.x), columns);
      for (let x = Math.max(Math.floor(xOf(ticks[i]) - box.x), 0); x < last; x++) {
        if (bytes[i] > tops[x]) tops[x] = bytes[i];
      }
    }
    const bottom = box.stripY + box.stripH;
    const height = (value) => (value / most) * (box.stripH - 6);
    pen.fillStyle = theme.curve;
    pen.beginPath();
    pen.moveTo(box.x, bottom);
    for (let x = 0; x < columns; x++) {
      pen.lineTo(box.x + x, bottom - height(tops[x]));
      pen.lineTo(box.x + x + 1, bottom - height(tops[x]));
    }
    pen.lineTo(box.x + columns, bottom);
    pen.fill();
    pen.strokeStyle = theme.soft;
    pen.setLineDash([2, 3]);
    const y = Math.round(bottom - height(most)) + 0.5;
    line(box.x, y, box.x + box.w, y);
    pen.setLineDash([]);
  }

  function drawRects() {
    const r = rects, pixel = 1 / box.scale;
    // Rectangles below a pixel both ways are painted once a pixel: of ten thousand in one place, one is seen.
    const columns = Math.ceil(box.w * box.scale) + 2;
    const rows = Math.ceil(box.h * box.scale) + 2;
    const painted = new Uint8Array(columns * rows);
    const fx = box.w / (view.t1 - view.t0), fy = box.h / (view.a1 - view.a0);
    const texts = [];
    let label = -1;
    for (let k = 0; k < r.n; k++) {
      const i = r.order[k];
      if (r.death[i] <= view.t0 || r.birth[i] >= view.t1 || r.to[i] <= view.a0 || r.from[i] >= view.a1) continue;
      const left = Math.max(box.x + (r.birth[i] - view.t0) * fx, box.x - 2);
      const right = Math.min(box.x + (r.death[i] - view.t0) * fx, box.x + box.w + 2);
      const top = Math.max(box.y + box.h - (r.to[i] - view.a0) * fy, box.y - 2);
      const bottom = Math.min(box.y + box.h - (r.from[i] - view.a0) * fy, box.y + box.h + 2);
      const x = Math.round(left * box.scale) / box.scale, y = Math.round(top * box.scale) / box.scale;
      let w = Math.max(Math.round(right * box.scale) / box.scale - x, pixel);
      let h = Math.max(Math.round(bottom * box.scale) / box.scale - y, pixel);
      if (right - left < pixel && bottom - top < pixel) {
        const column = Math.round((x - box.x) * box.scale) + 1, row = Math.round((y - box.y) * box.scale) + 1;
        if (column >= 0 && column < columns && row >= 0 && row < rows) {
          // A faded pixel may still be overpainted by the chosen label.
          const mark = chosen < 0 || r.label[i] === chosen ? 2 : 1;
          if (painted[row * columns + column] >= mark) continue;
          painted[row * columns + column] = mark;
        }
      }
      if (r.label[i] !== label) {
        label = r.label[i];
        pen.fillStyle = chosen < 0 || label === chosen ? "#" + plan.labels[label].colour : theme.faded;
      }
      if (w > 4 && h > 4) {
        w -= 1;
        h -= 1;
      }
      pen.fillRect(x, y, w, h);
      if (w > 54 && h > 15) texts.push(i, x, y, w, h);
    }
    drawTexts(texts);
  }

  // Names inside rectangles that have room.
  function drawTexts(texts) {
    pen.textAlign = "left";
    for (let k = 0; k < texts.length && k < 5 * 400; k += 5) {
      const [i, x, y, w, h] = texts.slice(k, k + 5);
      const label = plan.labels[rects.label[i]];
      const shown = chosen < 0 || rects.label[i] === chosen;
      pen.fillStyle = shown ? "#10141a" : theme.soft;
      const start = Math.max(x, box.x) + 5;
      const room = Math.min(x + w, box.x + box.w) - start - 4;
      const middle = (Math.max(y, box.y) + Math.min(y + h, box.y + box.h)) / 2;
      const two = h > 32;
      const name = fit(label.text, room);
      if (name) pen.fillText(name, start, two ? middle - 7 : middle);
      if (two) {
        const size = human(rects.to[i] - rects.from[i]);
        // Half a number is a wrong number.
        if (pen.measureText(size).width <= room) pen.fillText(size, start, middle + 8);
      }
    }
  }

  // As much of a text as there is room for: the end of a label tells it from others of the same file.
  function fit(text, room) {
    const width = pen.measureText(text).width;
    if (width <= room) return text;
    for (let most = Math.floor((text.length * room) / width); most > 7; most--) {
      const short = "…" + text.slice(-most);
      if (pen.measureText(short).width <= room) return short;
    }
    return "";
  }

  function drawAliases() {
    pen.setLineDash([4, 3]);
    for (let i = 0; i < aliases.n; i++) {
      if (chosen < 0 || aliases.label[i] === chosen) outline(aliases, i, 1);
    }
    pen.setLineDash([]);
  }

  function drawArenas() {
    if (plan.arenas.length < 2) return;
    pen.textAlign = "right";
    for (const arena of plan.arenas) {
      const y = Math.round(yOf(arena.from)) + 0.5;
      pen.strokeStyle = theme.ink;
      pen.lineWidth = 1;
      line(box.x, y, box.x + box.w, y);
      const name = "lane " + arena.lane;
      const middle = Math.max(yOf(Math.min(arena.to, view.a1)), box.y) + 10;
      if (yOf(arena.from) - middle < 8 || arena.to <= view.a0 || arena.from >= view.a1) continue;
      const width = pen.measureText(name).width;
      pen.fillStyle = theme.ground;
      pen.fillRect(box.x + box.w - width - 10, middle - 8, width + 10, 16);
      pen.fillStyle = theme.ink;
      pen.fillText(name, box.x + box.w - 5, middle);
    }
  }

  function outline(r, i, width) {
    const x0 = Math.max(xOf(r.birth[i]), box.x - 9), x1 = Math.min(xOf(r.death[i]), box.x + box.w + 9);
    const y0 = Math.max(yOf(r.to[i]), box.y - 9), y1 = Math.min(yOf(r.from[i]), box.y + box.h + 9);
    if (x1 < x0 || y1 < y0) return;
    pen.strokeStyle = theme.ink;
    pen.lineWidth = width;
    pen.strokeRect(x0 + width / 2, y0 + width / 2, Math.max(x1 - x0 - width, 1), Math.max(y1 - y0 - width, 1));
  }

  function drawPeak() {
    if (plan.makespan === 0 || plan.peak < view.t0 || plan.peak > view.t1) return;
    const x = Math.round(xOf(plan.peak)) + 0.5;
    pen.strokeStyle = pen.fillStyle = theme.peak;
    pen.lineWidth = 1.5;
    pen.setLineDash([6, 4]);
    line(x, box.stripY, x, box.stripY + box.stripH);
    line(x, box.y, x, box.y + box.h);
    pen.setLineDash([]);
    pen.textAlign = "center";
    const text = "peak " + plan.peak;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x, box.x + half), box.x + box.w - half), box.stripY + box.stripH + margin.gap / 2);
  }

  function line(x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function marks(from, to, step) {
    const list = [];
    for (let k = Math.ceil(from / step); k * step <= to; k++) list.push(k * step);
    return list;
  }
  const powerOfTwo = (step) => 2 ** Math.max(Math.ceil(Math.log2(step)), 0);
  function powerOfTen(step) {
    const ten = 10 ** Math.floor(Math.log10(Math.max(step, 1)));
    return Math.max([1, 2, 5, 10].find((k) => k * ten >= step) * ten, 1);
  }

  // The first index whose tick is after t.
  function firstAfter(ticks, t) {
    let low = 0, high = ticks.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (ticks[mid] <= t) low = mid + 1;
      else high = mid;
    }
    return low;
  }

  function human(bytes) {
    for (const [unit, scale, digits] of [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
      if (bytes >= scale) return (bytes / scale).toFixed(digits) + " " + unit;
    }
    return bytes + " B";
  }
  // In the largest unit that tells marks apart with at most two decimals.
  function address(bytes, step) {
    if (bytes === 0) return "0";
    for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (step * 4 >= scale) return bytes / scale + " " + unit;
    }
    return bytes + " B";
  }

  // ---- the pointer and the keys ----

  let drag = null;
  const place = (e) => {
    const at = canvas.getBoundingClientRect();
    return [e.clientX - at.left, e.clientY - at.top];
  };

  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const lines = e.deltaMode === 1 ? 30 : 1;
    // Shift turns the wheel sideways in some browsers.
    const factor = Math.exp(Math.max(-240, Math.min(240, (e.deltaY || e.deltaX) * lines)) * 0.0025);
    const [x, y] = place(e);
    const strip = y < box.y; // over the load there is only time
    zoom(x, y, e.altKey ? 1 : factor, e.shiftKey || strip ? 1 : factor);
    hover(e);
  }, { passive: false });

  canvas.addEventListener("pointerdown", (e) => {
    if (e.button !== 0) return;
    canvas.setPointerCapture(e.pointerId);
    drag = { at: place(e), start: place(e), moved: false };
  });
  canvas.addEventListener("pointermove", (e) => {
    if (!drag) return hover(e);
    const [x, y] = place(e);
    drag.moved ||= Math.hypot(x - drag.start[0], y - drag.start[1]) > 3;
    if (!drag.moved) return;
    canvas.classList.add("dragging");
    tip.hidden = true;
    pan(x - drag.at[0], y - drag.at[1]);
    drag.at = [x, y];
  });
  canvas.addEventListener("pointerup", (e) => {
    canvas.classList.remove("dragging");
    const click = drag && !drag.moved;
    drag = null;
    if (!click) return;
    hover(e);
    const found = hovered ? hovered.table.label[hovered.i] : -1;
    choose(found === chosen ? -1 : found, true);
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    if (hovered) { hovered = null; redraw(); }
  });
  canvas.addEventListener("dblclick", () => show(whole));
  canvas.addEventListener("keydown", (e) => {
    const [x, y] = [box.x + box.w / 2, box.y + box.h / 2];
    const keys = {
      ArrowLeft: () => pan(80, 0), ArrowRight: () => pan(-80, 0), ArrowUp: () => pan(0, 80), ArrowDown: () => pan(0, -80),
      "+": () => zoom(x, y, 0.8, 0.8), "=": () => zoom(x, y, 0.8, 0.8), "-": () => zoom(x, y, 1.25, 1.25),
      0: () => show(whole), Escape: () => choose(-1),
    };
    if (!keys[e.key] || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    keys[e.key]();
  });

  // The rectangle under a point, or the nearest within two pixels: short lives are thin.
  function pick(r, x, y) {
    const t = tickAt(x), a = addressAt(y);
    const reachT = (2 / box.w) * (view.t1 - view.t0), reachA = (2 / box.h) * (view.a1 - view.a0);
    let best = -1, least = 1;
    for (let i = 0; i < r.n; i++) {
      const dt = Math.max(r.birth[i] - t, t - r.death[i], 0) / reachT;
      const da = Math.max(r.from[i] - a, a - r.to[i], 0) / reachA;
      if (dt === 0 && da === 0 && t < r.death[i] && a < r.to[i]) return i;
      if (dt + da < least) { best = i; least = dt + da; }
    }
    return best;
  }

  function hover(e) {
    const [x, y] = place(e);
    const inMap = x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h;
    const inStrip = x >= box.x && x < box.x + box.w && y >= box.stripY && y < box.stripY + box.stripH;
    let found = null;
    if (inMap) {
      const i = pick(rects, x, y);
      if (i >= 0) found = { table: rects, i };
    }
    if (!found !== !hovered || (found && (found.i !== hovered.i || found.table !== hovered.table))) redraw();
    hovered = found;
    if (found) tell(x, y, describe(found.i, tickAt(x)));
    else if (inStrip) tell(x, y, describeLoad(tickAt(x)));
    else tip.hidden = true;
  }

  function describe(i, tick) {
    const lines = [plan.labels[rects.label[i]].text, ...facts(rects, i)];
    for (let k = 0; k < aliases.n; k++) {
      const here = aliases.from[k] < rects.to[i] && rects.from[i] < aliases.to[k];
      if (here && aliases.birth[k] <= tick && tick < aliases.death[k]) {
        lines.push("shared with " + plan.labels[aliases.label[k]].text + ", " + facts(aliases, k)[2]);
      }
    }
    return lines;
  }

  function facts(r, i) {
    const bytes = r.to[i] - r.from[i];
    const asked = r.slack[i] > 0 ? ", asked " + (bytes - r.slack[i]) : "";
    const lines = [
      human(bytes) + " (" + bytes + " B" + asked + ")",
      "offset " + r.from[i] + " to " + r.to[i],
      "ticks " + r.birth[i] + " to " + r.death[i] + ", buffer " + r.slot[i],
    ];
    if (plan.lanes.length > 1) lines.push("lane " + plan.lanes[r.lane[i]]);
    return lines;
  }

  function describeLoad(t) {
    const bytes = load.bytes[Math.max(firstAfter(load.ticks, t) - 1, 0)];
    return ["load at tick " + Math.floor(t), human(bytes) + " (" + bytes + " B)", ((bytes / most) * 100).toFixed(1) + " % of the arena"];
  }

  // Beside the pointer, inside the map. Texts are set as texts: a label cannot bring markup.
  function tell(x, y, lines) {
    tip.replaceChildren(...lines.map((text, k) => {
      const part = document.createElement(k === 0 ? "b" : "div");
      part.textContent = text;
      return part;
    }));
    tip.hidden = false;
    const left = canvas.offsetLeft, top = canvas.offsetTop;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = left + (x + 16 + w < box.width ? x + 16 : Math.max(x - 12 - w, 0)) + "px";
    tip.style.top = top + (y + 16 + h < box.height ? y + 16 : Math.max(y - 12 - h, 0)) + "px";
  }

  // ---- the table ----

  const search = document.getElementById("search");
  const rows = document.getElementById("rows");
  const mostRows = 500;
  let sorting = { key: "peak", up: false };
  let cells = new Map();

  function fill() {
    const wanted = search.value.trim().toLowerCase();
    const { key, up } = sorting;
    const compare = (a, b) => (typeof a === "string" ? (a < b ? -1 : a > b ? 1 : 0) : a - b);
    const found = plan.labels
      .map((label, index) => ({ label, index }))
      .filter(({ label }) => label.text.toLowerCase().includes(wanted))
      .sort((a, b) => (up ? 1 : -1) * compare(a.label[key], b.label[key]) || b.label.total - a.label.total || a.index - b.index);
    cells = new Map();
    rows.replaceChildren(...found.slice(0, mostRows).map(({ label, index }) => {
      const row = document.createElement("tr");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = "#" + label.colour;
      const name = cell(label.text, "text");
      name.title = label.text;
      name.prepend(swatch);
      const peak = label.peak ? human(label.peak) : "–";
      row.append(
        name, cell(peak, label.peak ? "" : "zero", label.peak + " B"), cell(label.peak_buffers || "–", label.peak ? "" : "zero"),
        cell(human(label.total), "", label.total + " B"), cell(label.buffers),
      );
      row.addEventListener("click", () => choose(index === chosen ? -1 : index));
      row.classList.toggle("chosen", index === chosen);
      cells.set(index, row);
      return row;
    }));
    const more = found.length - mostRows;
    const of = found.length === plan.labels.length ? "" : " of " + plan.labels.length;
    document.getElementById("count").textContent = more > 0 ? more + " more: narrow the search" : found.length + of + " labels";
    for (const head of document.querySelectorAll("th")) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
  }

  function cell(text, name = "", title = "") {
    const td = document.createElement("td");
    td.className = name;
    td.textContent = text;
    if (title) td.title = title;
    return td;
  }

  function choose(label, scroll = false) {
    cells.get(chosen)?.classList.remove("chosen");
    chosen = label;
    const row = cells.get(label);
    row?.classList.add("chosen");
    if (scroll) row?.scrollIntoView({ block: "nearest" });
    redraw();
  }

  search.addEventListener("input", fill);
  for (const head of document.querySelectorAll("th")) {
    head.addEventListener("click", () => {
      const key = head.dataset.key;
      sorting = { key, up: sorting.key === key ? !sorting.up : key === "text" };
      fill();
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readTheme);
  new ResizeObserver(resize).observe(canvas);
  readTheme();
  resize();
  fill();
})();
