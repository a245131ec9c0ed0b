// The live page: asks /status each second while it is seen, and shows what it says.
// Whatever a request or a server says is put in as text, never as markup.
"use strict";

const EVERY_MS = 1000;
const LONGEST_MS = 30000;
const GIVE_UP_MS = 8000;
const KEY_NAME = "headrace-api-key";
const SVG = "http://www.w3.org/2000/svg";
const MAX_FREE_CELLS = 32;

const byId = (id) => document.getElementById(id);

// ---- text

function time(seconds) {
  if (seconds === null) return "n/a";
  if (seconds < 1) {
    const ms = seconds * 1e3;
    return `${ms.toFixed(ms >= 99.95 ? 0 : ms >= 9.995 ? 1 : 2)} ms`;
  }
  if (seconds < 99.5) return `${seconds.toFixed(seconds >= 9.995 ? 1 : 2)} s`;
  return span(seconds);
}

function span(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 100) return `${whole} s`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => whole >= size);
  return parts
    .slice(first, first + 2)
    .map(([unit, size], at) => [Math.floor((at ? whole % parts[first][1] : whole) / size), unit])
    .filter(([count]) => count)
    .map((each) => each.join(" "))
    .join(" ");
}

function size(nbytes) {
  for (const [unit, each] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (nbytes >= each) return `${(nbytes / each).toFixed(1)} ${unit}`;
  }
  return `${nbytes} B`;
}

const percent = (share) => (share === null ? "n/a" : `${(100 * share).toFixed(0)} %`);
const rate = (value) => (value >= 99.95 ? value.toFixed(0) : value.toFixed(1));
const several = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

// ---- nodes

function el(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function svg(tag, facts) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(facts)) node.setAttribute(name, value);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function name(node, className) {
  if (node.getAttribute("class") !== className) node.setAttribute("class", className);
}

// Keeps the nodes of what is still there, so that focus and pointing survive an update.
const kept = new WeakMap();

function sync(parent, items, keyOf, make, update) {
  const before = kept.get(parent) || new Map();
  const now = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const node = before.get(key) || make(item);
    before.delete(key);
    now.set(key, node);
    update(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of before.values()) node.remove();
  kept.set(parent, now);
}

// ---- shapes: a state is told by its word and by a shape, the colour comes on top

const SHAPES = {
  ring: [],
  quarter: ["path", { class: "full", d: "M6 6V1A5 5 0 0 1 11 6Z" }],
  half: ["path", { class: "full", d: "M6 1A5 5 0 0 1 6 11Z" }],
  most: ["path", { class: "full", d: "M6 6V1A5 5 0 1 1 1 6Z" }],
  full: ["circle", { class: "full", cx: 6, cy: 6, r: 5 }],
  eye: ["circle", { class: "full", cx: 6, cy: 6, r: 2.4 }],
};

function shape(kind) {
  const node = svg("svg", { class: "shape", viewBox: "0 0 12 12", "aria-hidden": "true" });
  const thick = { "stroke-width": 1.5, "stroke-linecap": "round", "stroke-linejoin": "round" };
  if (kind === "cross") {
    node.append(svg("path", { d: "M2 2L10 10M10 2L2 10", ...thick, "stroke-width": 2.2 }));
  } else if (kind === "down") {
    node.append(svg("path", { d: "M1 2.5H11L6 10.5Z", ...thick }));
  } else if (kind === "again") {
    node.append(svg("path", { d: "M10.4 6A4.4 4.4 0 1 1 8.6 2.4M8.8 0.6V2.8H6.4", ...thick }));
  } else if (kind === "pause") {
    node.append(svg("path", { d: "M3.5 2V10M8.5 2V10", ...thick, "stroke-width": 2.4 }));
  } else if (kind === "dots") {
    for (const cx of [1.8, 6, 10.2]) node.append(svg("circle", { class: "full", cx, cy: 6, r: 1.4 }));
  } else {
    node.append(svg("circle", { cx: 6, cy: 6, r: 5, "stroke-width": 1.3 }));
    if (SHAPES[kind].length) node.append(svg(...SHAPES[kind]));
  }
  return node;
}

const LOOKS = {
  // decoders and sources
  "ready": ["full", "good"], "in service": ["full", "good"], "starting": ["dots", "busy"],
  "waiting": ["pause", "warn"], "waiting to restart": ["again", "warn"],
  "set aside": ["cross", "bad"], "gone": ["cross", "bad"], "stopped": ["ring", ""],
  // lanes and slots
  "free": ["ring", "free"], "reserved": ["quarter", "busy"], "leased": ["half", "busy"],
  "reading": ["eye", "busy"], "published": ["full", "good"], "draining": ["down", "warn"],
  "quarantined": ["cross", "bad"],
  // requests
  "queued": ["dots", ""], "parked": ["pause", "warn"], "prefill": ["half", "busy"],
  "decoding": ["full", "good"], "ended": ["ring", ""], "finished": ["full", "good"],
  "client-left": ["ring", ""],
};
const OF_A_SLOT = { ready: ["most", "busy"] };
const OF_A_REQUEST = { waiting: ["dots", ""] };

function look(word, more = {}) {
  return more[word] || LOOKS[word] || ["cross", "bad"];
}

function state(node, word, more, says = word) {
  const [kind, tone] = look(word, more);
  const seen = `${kind}|${tone}|${says}`;
  if (node.dataset.seen === seen) return;
  node.dataset.seen = seen;
  node.className = `state ${tone}`;
  node.replaceChildren(shape(kind), el("span", "", says));
}

// ---- sections

const FIGURES = ["throughput", "requests", "TTFT", "token time", "queue", "open"];

function figures(now) {
  const { rates, queue } = now;
  const of = (median, unit) => [
    time(median.p50_s), "",
    median.samples ? `p99 ${time(median.p99_s)}` : `no ${unit} in ${span(median.window_s)}`,
  ];
  const values = {
    "throughput": [rate(rates.tokens_per_s), "tokens/s", `over ${rates.window_s} s`],
    "requests": [rate(rates.requests_per_s), "/s", `over ${rates.window_s} s`],
    "TTFT": of(rates.ttft, "request"),
    "token time": of(rates.token, "token"),
    "queue": [String(queue.waiting), "", `${size(queue.nbytes)} held`],
    "open": [String(now.num_open), "", several(now.decoders.length, "decoder")],
  };
  const median = (of) => (of.samples ? `, median of ${of.samples}` : "");
  const means = { "TTFT": median(rates.ttft), "token time": median(rates.token) };
  sync(byId("figures"), FIGURES, (each) => each, (each) => {
    const node = el("div");
    node.append(el("dt", "", each), el("dd", "value"), el("dd", "beside"));
    node.children[1].append(el("span"), " ", el("span", "unit"));
    if (each === "throughput") node.append(history());
    return node;
  }, (node, each) => {
    const [value, unit, beside] = values[each];
    say(node.firstChild, each + (means[each] || ""));
    say(node.children[1].firstChild, value);
    say(node.children[1].lastChild, unit);
    say(node.children[2], beside);
    if (each === "throughput") drawHistory(node.lastChild, rates.history);
  });
}

function history() {
  const node = svg("svg", {
    class: "history", viewBox: "0 0 59 40", preserveAspectRatio: "none", role: "img",
  });
  node.append(svg("path", { class: "area" }), svg("path", { class: "line" }));
  return node;
}

function drawHistory(node, counts) {
  const most = Math.max(...counts, 1);
  const points = counts.map((count, at) => `${at} ${(38 - (36 * count) / most).toFixed(1)}`);
  node.setAttribute("aria-label",
    `tokens in each of the last ${counts.length} seconds, at most ${Math.max(...counts)}`);
  node.firstChild.setAttribute("d", `M0 40L${points.join("L")}L59 40Z`);
  node.lastChild.setAttribute("d", `M${points.join("L")}`);
}

function alarms(now) {
  const found = [];
  for (const decoder of now.decoders) {
    if (decoder.state === "set aside") {
      found.push(`decoder ${decoder.name} is set aside: ${decoder.reason}`);
    }
    for (const source of decoder.sources) {
      if (source.state === "set aside" || source.state === "gone") {
        found.push(`source ${called(source)} of decoder ${decoder.name} is ${source.state}` +
          (source.reason ? `: ${source.reason}` : ""));
      }
    }
    for (const apart of decoder.quarantined) {
      found.push(`decoder ${decoder.name}: what attempt ${apart.attempt} left is quarantined for ` +
        `${span(apart.for_s)}: ${apart.reason}`);
    }
  }
  byId("alarms").hidden = !found.length;
  sync(byId("alarm-list"), found.map((text, at) => [at, text]), ([at]) => at, () => {
    const node = el("li");
    node.append(shape("cross"), el("span"));
    return node;
  }, (node, [, text]) => say(node.lastChild, text));
}

const called = (source) => source.name || `number ${source.source}`;

function decoders(now) {
  byId("no-decoders").hidden = now.decoders.length > 0;
  sync(byId("decoder-list"), now.decoders, (each) => each.name, (each) => {
    const node = el("article", "decoder");
    const head = el("div", "head");
    head.append(el("h3", "", each.name), el("span", "state"), el("span", "note"),
      el("span", "facts"), el("span", "reason"));
    node.append(head, el("div", "rows"));
    return node;
  }, (node, each) => {
    const [, status, note, facts, reason] = node.firstChild.children;
    state(status, each.state);
    note.hidden = !each.note;
    say(note, each.note);
    const told = [
      each.pid ? `pid ${each.pid}` : "",
      each.incarnation ? `started again ${several(each.incarnation, "time")}` : "",
      each.context ? `${each.context} positions a lane` : "",
      each.looked_s !== null && each.looked_s > 5 ? `last told ${span(each.looked_s)} ago` : "",
      each.truncated ? "holds more than it could tell" : "",
    ];
    say(facts, told.filter(Boolean).join(", "));
    say(reason, each.reason);
    const known = each.lanes.length + each.lanes_free > 0 || each.sources.length > 0;
    const lanes = known ? [{ lanes: each }] : [];
    sync(node.lastChild, [...lanes, ...each.sources],
      (row) => (row.lanes ? "lanes" : `source ${row.name} ${row.source}`), makeHeld, showHeld);
  });
}

function makeHeld() {
  const node = el("div", "held");
  const who = el("div", "who");
  who.append(el("strong"), el("span", "state"), el("span", "note"), el("span", "facts"),
    el("span", "reason"));
  node.append(who, el("ul", "cells"));
  return node;
}

function showHeld(node, row) {
  const [title, status, note, facts, reason] = node.firstChild.children;
  if (row.lanes) {
    const held = row.lanes;
    say(title, "lanes");
    status.hidden = note.hidden = reason.hidden = true;
    say(facts, `${held.lanes_free} of ${held.lanes.length + held.lanes_free} free`);
    cells(node.lastChild, "lane", laneCells(held));
    return;
  }
  say(title, `source ${called(row)}`);
  state(status, row.state);
  note.hidden = !row.note;
  say(note, row.note);
  const told = [
    row.pid ? `pid ${row.pid}` : "", row.restarts ? `started again ${several(row.restarts, "time")}` : "",
  ];
  say(facts, told.filter(Boolean).join(", "));
  say(reason, row.reason);
  reason.hidden = !row.reason;
  cells(node.lastChild, "slot", row.slots.map((slot) => ({
    key: slot.slot, word: slot.state, title: `slot ${slot.slot}`, what: [
      holder(slot), slot.for_s >= 1 ? `for ${span(slot.for_s)}` : "",
      slot.tokens.length ? `${slot.tokens.join(", ")} out` : "",
    ],
  })));
}

function laneCells(held) {
  const used = held.lanes.map((lane, at) => ({
    key: `${at}`, word: lane.state, title: "lane", what: [
      lane.request === null ? lane.attempt : `#${lane.request}`,
      lane.for_s >= 1 ? `for ${span(lane.for_s)}` : "", lane.reason,
    ],
  }));
  const shown = Math.min(held.lanes_free, MAX_FREE_CELLS);
  const free = Array.from({ length: shown }, (_, at) => ({
    key: `free ${at}`, word: "free", title: "lane", what: [],
  }));
  const left = held.lanes_free - shown;
  if (left) free.push({ key: "more", word: "free", title: `${left} more lanes`, what: [] });
  return [...used, ...free];
}

function holder(held) {
  return held.request === null ? held.holder : `#${held.request}`;
}

function cells(list, kind, items) {
  list.hidden = !items.length;
  sync(list, items, (each) => each.key, () => {
    const node = el("li");
    node.append(el("span", "state"), el("span", "which"), el("span", "what"));
    return node;
  }, (node, each) => {
    const [, tone] = look(each.word, kind === "slot" ? OF_A_SLOT : {});
    name(node, `cell ${tone}`);
    state(node.firstChild, each.word, kind === "slot" ? OF_A_SLOT : {});
    say(node.children[1], each.title);
    say(node.lastChild, each.what.filter(Boolean).join(", "));
  });
}

// Rows of a table: a cell is a text, [text, small text], or a function that fills it.
function row(node, columns) {
  columns.forEach((column, at) => {
    const cell = node.children[at];
    cell.classList.toggle("none", column === "");
    if (typeof column === "function") return column(cell);
    const [text, small] = Array.isArray(column) ? column : [column, ""];
    if (!cell.firstChild) cell.append(el("span"), el("span", "what"));
    say(cell.firstChild, text);
    say(cell.lastChild, small);
    cell.lastChild.hidden = !small;
    return undefined;
  });
}

function makeRow(columns) {
  return () => {
    const node = el("tr");
    for (const [label, className] of columns) {
      const cell = el(label === "request" || label === "kind" ? "th" : "td", className);
      if (cell.tagName === "TH") cell.setAttribute("scope", "row");
      else cell.dataset.label = label;
      node.append(cell);
    }
    return node;
  };
}

const OPEN = makeRow([
  ["request", ""], ["", "is"], ["decoder", ""], ["prompt", "number"], ["tokens", "number"],
  ["imported", "wide"], ["TTFT", "number"], ["tail", "number"], ["age", "number"],
]);

function open(now) {
  const left = now.num_open - now.open.length;
  say(byId("open-count"), now.num_open ? `${now.num_open}${left ? `, the latest ${now.open.length} are shown` : ""}` : "");
  byId("no-open").hidden = now.open.length > 0;
  byId("open-table").hidden = now.open.length === 0;
  sync(byId("open-rows"), now.open, (each) => each.request, OPEN, (node, each) => {
    const { choices } = each;
    const sum = (of) => choices.reduce((all, choice) => all + of(choice), 0);
    const where = [...new Set(choices.map((choice) => choice.decoder).filter(Boolean))];
    const tails = choices.map((choice) => choice.tail_s).filter((tail) => tail !== null);
    row(node, [
      [`#${each.request}`, [each.label, each.model].filter(Boolean).join(", ")],
      (cell) => phases(cell, choices),
      where.join(", "),
      String(each.prompt_tokens),
      `${sum((choice) => choice.tokens)} of ${each.max_tokens * choices.length}`,
      (cell) => progress(cell, sum((c) => c.bytes_imported), sum((c) => c.bytes_total)),
      each.ttft_s === null ? "" : time(each.ttft_s),
      tails.length ? time(Math.max(...tails)) : "",
      span(each.age_s),
    ]);
  });
}

function phases(cell, choices) {
  const counts = new Map();
  for (const { phase } of choices) counts.set(phase, (counts.get(phase) || 0) + 1);
  sync(cell, [...counts], ([phase]) => phase, () => el("span", "state"), (node, [phase, count]) => {
    state(node, phase, OF_A_REQUEST, count > 1 ? `${phase} x ${count} ` : `${phase} `);
  });
}

function progress(cell, done, total) {
  if (!cell.firstChild) {
    const bar = svg("svg", { class: "progress", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
    bar.append(svg("rect", { x: 0, y: 0, width: 0, height: 6 }));
    cell.append(bar, el("span"));
  }
  cell.firstChild.style.display = total ? "" : "none";
  cell.classList.toggle("none", !total);
  if (total) cell.firstChild.firstChild.setAttribute("width", (100 * done) / total);
  say(cell.lastChild, total ? `${size(done)} of ${size(total)}` : "");
}

const RECENT = makeRow([
  ["request", ""], ["", "is"], ["route", "wide"], ["prompt", "number"], ["tokens", "number"],
  ["TTFT", "number"], ["tail", "number"], ["hidden", "number"], ["early", "number"],
  ["ended", "number"], ["", "link"],
]);

function recent(now) {
  byId("no-recent").hidden = now.ended.length > 0;
  say(byId("no-recent"), now.recent ? "No request has ended yet."
    : "None are kept: the config has recent = 0 under [page].");
  byId("recent-table").hidden = now.ended.length === 0;
  byId("recent-note").hidden = now.ended.length === 0;
  say(byId("recent-count"), now.ended.length ? String(now.ended.length) : "");
  sync(byId("recent-rows"), now.ended, (each) => each.request, RECENT, (node, each) => {
    const first = each.choices[0];
    const more = each.choices.length > 1 ? `, first of ${each.choices.length} choices` : "";
    const status = each.in_stream ? "told in the stream" : `HTTP ${each.status}`;
    const ended = each.terminal === "finished" ? "" : [status, each.reason].filter(Boolean).join(": ");
    const facts = first ? [
      first.why, first.local ? "by the owner itself" : "",
      first.attempts > 1 ? several(first.attempts, "attempt") : "",
      first.cached_tokens ? `${first.cached_tokens} tokens kept before` : "",
    ].filter(Boolean).join("; ") : "";
    row(node, [
      [`#${each.request}`, [each.label, each.model].filter(Boolean).join(", ")],
      (cell) => terminal(cell, each.terminal, ended),
      first ? [`${first.route}${more}`, facts] : "",
      String(each.prompt_tokens), String(each.tokens),
      time(each.ttft_s),
      time(first ? first.tail_s : null),
      percent(first ? first.hidden_share : null),
      early(first),
      `${span(each.ended_s)} ago`,
      (cell) => traceLink(cell, each.request, each.trace),
    ]);
  });
}

function terminal(cell, word, small) {
  if (!cell.firstChild) cell.append(el("span", "state"), el("span", "what"));
  state(cell.firstChild, word);
  say(cell.lastChild, small);
  cell.lastChild.hidden = !small;
  cell.classList.toggle("told", Boolean(small));
}

function early(choice) {
  if (!choice || choice.bytes_before_prefill_end === null) return "n/a";
  const share = choice.kv_bytes ? choice.bytes_before_prefill_end / choice.kv_bytes : null;
  return [size(choice.bytes_before_prefill_end), share === null ? "" : `${percent(share)} of ${size(choice.kv_bytes)}`];
}

function traceLink(cell, request, there) {
  if (!cell.firstChild) cell.append(link(request));
  cell.firstChild.hidden = !there;
}

function link(request) {
  const node = el("a", "", "trace");
  node.href = `trace/${request}`;
  node.setAttribute("download", `headrace-request-${request}.json`);
  node.setAttribute("aria-label", `Perfetto trace of request ${request}`);
  node.addEventListener("click", (event) => {
    if (!key()) return;
    event.preventDefault();
    download(node, request);
  });
  return node;
}

async function download(node, request) {
  try {
    const reply = await fetch(`trace/${request}`, { headers: headers(), cache: "no-store" });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    const address = URL.createObjectURL(await reply.blob());
    const offer = el("a");
    offer.href = address;
    offer.download = `headrace-request-${request}.json`;
    offer.click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  } catch (fault) {
    say(node, `no trace (${fault.message})`);
  }
}

const FAULTS = makeRow([["kind", ""], ["reason", ""], ["count", "number"]]);
const KINDS = {
  quarantined: "out of service now", ended: "requests ended", rejected: "rejected before the queue",
  restarts: "restarts", retries: "attempts retried", dropped: "messages dropped",
};

function faults(now) {
  byId("no-faults").hidden = now.faults.length > 0;
  byId("faults-table").hidden = now.faults.length === 0;
  sync(byId("fault-rows"), now.faults, (each) => `${each.kind} ${each.reason}`, FAULTS,
    (node, each) => row(node, [KINDS[each.kind] || each.kind, each.reason, String(each.count)]));
}

// ---- swimlanes

const LANES_PX = 54;
const ROWS = {  // top and height, px
  "compute": [2, 11], "write": [14, 8], "write both": [14, 8],
  "import": [31, 11], "parked": [31, 11], "neighbour": [43, 8], "decode": [43, 8],
};
const BARS = {
  "compute": "the source computes a layer group", "write": "it writes the group into the slot",
  "write both": "it computes and writes several layers", "import": "the owner imports a piece",
  "parked": "parked, waiting for a lane", "neighbour": "the owner decodes for others",
  "decode": "its own first decode step",
};
const MARKS = {
  granted: "prefill granted", final: "prefill end", published: "published",
  first_token: "first token", cancel: "cancel", ended: "ended",
};
const LEGEND_MARKS = ["final", "published", "first_token"];
const EVIDENCE = {
  host: "host clock",
  fake: "fake device, nothing is claimed about kernels",
  device: "device events, errors in the trace",
};

function swimlanes(now) {
  byId("no-lanes").hidden = now.drawings.length > 0;
  byId("legend").hidden = now.drawings.length === 0;
  byId("lanes-note").hidden = now.drawings.length === 0;
  const used = new Set(now.drawings.flatMap((each) => [...each.source, ...each.owner].map((bar) => bar[0])));
  const marked = new Set(now.drawings.flatMap((each) => each.marks.map((mark) => mark[0])));
  const tail = now.drawings.some((each) => each.tail) ? [["tail", "transfer tail"]] : [];
  const items = [
    ...Object.entries(BARS).filter(([kind]) => used.has(kind)), ...tail,
    ...LEGEND_MARKS.filter((kind) => marked.has(kind)).map((kind) => [`mark ${kind}`, MARKS[kind]]),
  ];
  sync(byId("legend"), items, ([kind]) => kind, ([kind, word]) => {
    const node = el("li");
    node.append(el("i", kind), word);
    return node;
  }, () => {});
  const ended = new Map(now.ended.map((each) => [each.request, each]));
  sync(byId("drawings"), now.drawings, (each) => `${each.request}.${each.choice}`,
    (each) => drawn(each, ended.get(each.request)), () => {});
}

function drawn(each, request) {
  const node = el("figure", "drawn");
  const caption = el("figcaption");
  const choice = request ? request.choices.find((one) => one.choice === each.choice) : undefined;
  const of = request && request.choices.length > 1 ? `, choice ${each.choice}` : "";
  caption.append(el("strong", "", `#${each.request}${of} ${each.route}`));
  if (request) caption.append(el("span", "", `${request.prompt_tokens} prompt tokens`));
  if (choice && choice.outcome !== "finished") caption.append(el("span", "", choice.outcome));
  if (choice && choice.tail_s !== null) {
    caption.append(el("span", "", `tail ${time(choice.tail_s)}`),
      el("span", "", `hidden ${percent(choice.hidden_share)}`));
  }
  caption.append(el("span", "", EVIDENCE[each.evidence] || each.evidence));
  if (request && request.trace) caption.append(link(each.request));
  const moments = [...LEGEND_MARKS, "cancel", "ended"]
    .map((kind) => each.marks.find((one) => one[0] === kind))
    .filter((mark) => mark)
    .map(([kind, at]) => `${MARKS[kind]} ${ms(at)}`);
  if (each.clocks === "contradictory") {
    moments.push("the two clocks contradict each other: the source is left out");
  }
  node.append(caption, lanes(each), el("p", "moments", moments.join(", ")));
  return node;
}

const ms = (us) => `${(us / 1e3).toFixed(us < 10000 ? 2 : 1)} ms`;

function lanes(each) {
  const node = el("div", "lanes");
  const labels = el("div", "labels");
  labels.style.height = `${LANES_PX}px`;
  for (const [word, top] of [["source", 1], ["owner", 30]]) {
    const label = el("span", "", word);
    label.style.top = `${top}px`;
    labels.append(label);
  }
  const place = el("div", "drawing");
  place.append(shapes(each), axis(each));
  node.append(labels, place);
  return node;
}

function shapes(each) {
  const length = each.ended_us - each.begun_us;
  const x = (us) => Math.min(1000, Math.max(0, (1000 * (us - each.begun_us)) / length));
  const node = svg("svg", {
    role: "img", viewBox: `0 0 1000 ${LANES_PX}`, preserveAspectRatio: "none",
    "aria-label": `lanes of source and owner for request ${each.request}`,
  });
  node.style.height = `${LANES_PX}px`;
  if (each.tail) {
    const [begun, ended] = each.tail;
    node.append(rect("tail", x(begun), x(ended), [0, LANES_PX], `transfer tail: ${ms(ended - begun)}`));
  }
  for (const bars of [each.source, each.owner]) {
    const seen = {};
    for (const [kind, begun, ended, layers, count] of bars) {
      seen[kind] = (seen[kind] || 0) + 1;
      const says = `${BARS[kind] || kind}${layers ? `, ${layers}` : ""}: at ${ms(begun)}, ` +
        `${ms(ended - begun)}${count > 1 ? `, ${count} drawn as one` : ""}`;
      const odd = seen[kind] % 2 ? "" : " odd";
      const device = each.evidence === "host" ? "" : " device";
      node.append(rect(kind + odd + device, x(begun), x(ended), ROWS[kind] || [43, 8], says));
    }
  }
  for (const [kind, at] of each.marks) {
    const line = svg("line", { class: `mark ${kind}`, x1: x(at), x2: x(at), y1: 0, y2: LANES_PX });
    line.append(titled(`${MARKS[kind] || kind} at ${ms(at)}`));
    node.append(line);
  }
  return node;
}

function rect(className, begun, ended, [top, height], says) {
  const node = svg("rect", { class: className, x: begun, y: top, width: Math.max(0, ended - begun), height });
  node.append(titled(says));
  return node;
}

function titled(text) {
  const node = svg("title", {});
  node.textContent = text;
  return node;
}

function axis(each) {
  const node = el("div", "axis");
  const length = each.ended_us - each.begun_us;
  const step = niceStep(length / 5);
  const digits = Math.max(0, -Math.floor(Math.log10(step / 1e3)));
  for (let at = Math.ceil(each.begun_us / step) * step; at <= each.ended_us; at += step) {
    const share = (at - each.begun_us) / length;
    if (share > 0.92 || share < 0) continue;
    const tick = el("span", "", (at / 1e3).toFixed(digits));
    tick.style.left = `${100 * share}%`;
    node.append(tick);
  }
  const unit = el("span", "", "ms");
  unit.style.left = "100%";
  node.append(unit);
  return node;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least) || 10 * power;
}

// ---- asking

let heldKey = "";
let timer = 0;
let failures = 0;
let asking = null;
let shownAt = null;

function key() {
  try {
    return sessionStorage.getItem(KEY_NAME) || heldKey;
  } catch {
    return heldKey;  // storage is off in this browser
  }
}

function keep(value) {
  heldKey = value;
  try {
    sessionStorage.setItem(KEY_NAME, value);
  } catch {
    // kept in this variable only
  }
}

const headers = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

function live(className, text) {
  const node = byId("live");
  name(node, className);
  const kinds = { good: "full", bad: "cross" };
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  node.replaceChildren(...(kinds[className] ? [shape(kinds[className])] : []), el("span", "", text));
}

function show(now) {
  figures(now);
  alarms(now);
  decoders(now);
  open(now);
  swimlanes(now);
  recent(now);
  faults(now);
  say(byId("clock"), now.clock);
  say(byId("up"), `Watched for ${span(now.up_s)}.`);
  byId("key-form").hidden = true;
  byId("content").hidden = byId("sections").hidden = false;
  byId("raw").hidden = Boolean(key());  // a link cannot carry it
  shownAt = new Date();
}

function askForKey() {
  const form = byId("key-form");
  if (key()) say(byId("key-says"), "This server refuses the API key that it was given.");
  byId("content").hidden = byId("sections").hidden = byId("raw").hidden = true;
  live("", "waiting for an API key");
  if (form.hidden) {
    form.hidden = false;
    byId("key").focus();
  }
}

function failed(what) {
  failures += 1;
  const wait = Math.min(LONGEST_MS, EVERY_MS * 2 ** failures);
  const asOf = shownAt ? ` Figures are of ${shownAt.toLocaleTimeString()}.` : "";
  live("bad", `No answer (${what}).${asOf} Next try in ${wait / 1000} s.`);
  return wait;
}

async function ask() {
  clearTimeout(timer);
  if (asking) asking.abort();
  const mine = new AbortController();
  asking = mine;
  const late = setTimeout(() => mine.abort(), GIVE_UP_MS);
  let wait = EVERY_MS;
  try {
    const reply = await fetch("status", { headers: headers(), cache: "no-store", signal: mine.signal });
    if (reply.status === 401) {
      askForKey();
      return;
    }
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    show(await reply.json());
    failures = 0;
    live("good", "live");
  } catch (fault) {
    if (asking !== mine) return;  // another asks by now, or nobody looks
    wait = failed(mine.signal.aborted ? "it takes too long" : fault.message);
  } finally {
    clearTimeout(late);
  }
  if (asking === mine && !document.hidden) timer = setTimeout(ask, wait);
}

function pause() {
  clearTimeout(timer);
  const mine = asking;
  asking = null;
  if (mine) mine.abort();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(byId("key").value);
  byId("key").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : ask()));
if (!document.hidden) ask();
