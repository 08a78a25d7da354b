// The live page of a server: loads its state once a second with the user's key. The key stays in this
// tab's session storage; texts of the server are set as text, never as HTML.
"use strict";
const KEY = "pcg-key", SECOND = 1000, KEPT = 180, RECENT = 60;
const $ = (id) => document.getElementById(id);
const text = (id, words) => { $(id).textContent = words; };
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const size = (bytes, unit, places = 2) => (bytes / unit).toFixed(places);
let key = sessionStorage.getItem(KEY), timer = null, history = [], asking = null, known = "";

function make(tag, given = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

// Return a row of a table: its head, and cells; numbers are aligned at the right.
function row(head, ...cells) {
  const made = make("tr", {}, make("th", { scope: "row" }, head));
  for (const cell of cells) {
    const isNumber = typeof cell === "number" || (typeof cell === "string" && /^[\d–]/.test(cell));
    made.append(make("td", isNumber ? { class: "n" } : {}, typeof cell === "number" ? whole.format(cell) : cell));
  }
  return made;
}

function fill(section, rows, none) {
  const body = document.querySelector(`#${section} tbody`);
  const columns = document.querySelectorAll(`#${section} thead th`).length;
  const empty = () => make("tr", {}, make("td", { class: "empty", colspan: columns }, none));
  body.replaceChildren(...(rows.length ? rows : [empty()]));
}

function named(name, ...asides) {
  const made = document.createDocumentFragment();
  made.append(make("code", {}, name));
  for (const aside of asides) if (aside) made.append(" ", make("span", { class: "aside" }, aside));
  return made;
}

const seconds = (s) => s === null ? "–" : s < 0.9995 ? `${(s * 1000).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
const share = (part, all) => all ? `${(100 * part / all).toFixed(1)}%` : "–";

// Estimate a percentile of a histogram, as Prometheus' histogram_quantile does.
function percentile(bounds, counts, percent) {
  const rank = counts.reduce((sum, count) => sum + count, 0) * percent / 100;
  if (!rank) return null;
  let below = 0, low = 0;
  for (const [place, bound] of bounds.entries()) {
    if (below + counts[place] >= rank) return low + (bound - low) * (rank - below) / counts[place];
    below += counts[place];
    low = bound;
  }
  return low;
}

// ------------------------------------------------------------------------------- display

// A key that may not see other tenants' use gets no numbers of the whole engine.
function showNumbers(now, before) {
  if (!now.engine) return;
  const rate = (field) => before && now.time_s > before.time_s
    ? Math.max(0, now.engine.tokens[field] - before.engine.tokens[field]) / (now.time_s - before.time_s) : 0;
  const { requests, pages } = now.engine, used = pages - now.engine.free_pages;
  const entries = [
    [whole.format(requests.running), "running requests", `${whole.format(requests.waiting)} waiting`],
    [whole.format(rate("generated")), "tokens per second", `${whole.format(rate("prompts"))} prompt tokens`],
    [whole.format(rate("trained")), "trained tokens per second", counted(now.jobs.filter((job) => job.is_active).length, "job")],
    [share(used, pages), "of the pages in use", counted(pages, "page")],
  ];
  $("numbers").replaceChildren(...entries.map(([number, name, aside]) => make("li", {},
    make("strong", {}, number), make("span", {}, name), make("span", { class: "aside" }, aside))));
}

function showChart() {
  const lines = { generated: [], prompts: [], trained: [] };
  const last = history.length ? history[history.length - 1].time_s : 0;
  let most = 1;
  const known = history.filter((one) => one.engine);
  for (let place = 1; place < known.length; place += 1) {
    const [before, now] = [known[place - 1], known[place]];
    for (const [name, points] of Object.entries(lines)) {
      const rate = Math.max(0, now.engine.tokens[name] - before.engine.tokens[name]) / Math.max(0.05, now.time_s - before.time_s);
      points.push([720 * (1 - (last - now.time_s) / KEPT), rate]);
      most = Math.max(most, rate);
    }
  }
  const chart = $("chart"), title = $("chart-title");
  const ns = "http://www.w3.org/2000/svg";
  chart.replaceChildren(title, ...Object.entries(lines).map(([name, points]) => {
    const path = document.createElementNS(ns, "path");
    path.setAttribute("class", name);
    path.setAttribute("d", points.map(([x, y], place) =>
      `${place ? "L" : "M"}${x.toFixed(1)} ${(174 - 164 * y / most).toFixed(1)}`).join(""));
    return path;
  }));
  text("top", `maximum: ${whole.format(most)}`);
}

function showLatencies(now) {
  if (!now.engine) return;
  const recent = history.find((one) => one.engine && now.time_s - one.time_s <= RECENT) || now;
  const names = { ttft: "to the first token", itl: "between two tokens", e2el: "whole request" };
  let count = 0;
  fill("latencies", Object.entries(names).map(([name, words]) => {
    const { bounds, counts, promised_s: promised, requests, kept } = now.engine.latencies[name];
    const since = recent === now ? counts.map(() => 0) : recent.engine.latencies[name].counts;
    const fresh = counts.map((number, place) => number - since[place]);
    if (name === "e2el") count = fresh.reduce((sum, number) => sum + number, 0);
    const found = [50, 90, 99].map((percent) => percentile(bounds, fresh, percent));
    const cells = found.map((one) => make("span", promised && one > promised ? { class: "bad" } : {}, seconds(one)));
    const made = row(words, ...cells, promised ? seconds(promised) : "–", share(kept, requests));
    for (const cell of made.querySelectorAll("td")) cell.className = "n";
    return made;
  }));
  text("span", `Percentiles of the last minute, in which ${counted(count, "request")} ended. The SLO is the server's; requests may
    set others. Met is the share of requests since the start.`);
}

function showTables(now) {
  fill("adapters", now.adapters.map((one) => row(
    named(`${one.name}`, one.tenant && `of ${one.tenant}`, `version ${one.version}`),
    one.method, size(one.size_bytes, 2 ** 20), one.running, one.waiting,
    one.is_trained ? "in training" : one.is_resident ? "on the device" : "in host memory",
  )), "No adapters yet: load or train an adapter.");
  fill("requests", now.running.map((one) => row(
    named(`${one.id.slice(0, 13)}…`, one.tenant && `of ${one.tenant}`), one.adapter || "base", one.prompt_tokens, one.output_tokens,
    one.age_s.toFixed(1),
  )), "No running requests.");
  fill("jobs", now.jobs.map((job) => {
    const bar = make("progress", { max: job.total_steps || 1, value: job.step, "aria-label": "steps" });
    const step = job.total_steps ? `${job.step} of ${job.total_steps}` : `${job.step}`;
    return row(named(job.name, job.tenant && `of ${job.tenant}`), job.error ? `${job.state}: ${job.error}` : job.state,
      step, job.loss === null ? "–" : job.loss.toFixed(4), bar);
  }), "No jobs.");
  const kinds = Object.entries(now.memory_bytes), total = kinds.reduce((sum, [, bytes]) => sum + bytes, 0);
  $("stack").replaceChildren(...kinds.map(([kind, bytes]) => {
    const part = make("span");
    part.style.setProperty("--c", `var(--${kind}, var(--other))`);
    part.style.width = `${100 * bytes / total}%`;
    return part;
  }));
  fill("memory", kinds.map(([kind, bytes]) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" }), head = document.createDocumentFragment();
    swatch.style.setProperty("--c", `var(--${kind}, var(--other))`);
    head.append(swatch, kind.replace("kv_", "KV ").replace("_", " "));
    return row(head, size(bytes, 2 ** 30, 3), share(bytes, total));
  }), "Unknown.");
}

function showServer(now) {
  document.querySelector("h1").textContent = now.model;
  document.title = `${now.model} – pcg serve`;
  const words = now.state === "running" ? "takes requests" : now.state === "draining" ? "drains and takes no requests" : "has ended";
  text("state", `It ${words}. pcg ${now.version}, up to ${now.max_model_len ? whole.format(now.max_model_len) : "any number of"} tokens; your key is “${now.key}”.`);
  $("dot").className = now.state === "running" ? "good" : "bad";
  const models = JSON.stringify([now.model, ...now.adapters.map((one) => one.name)]);
  if (models !== known) {
    known = models;
    const select = $("ask").elements.model, chosen = select.value;
    select.replaceChildren(...JSON.parse(models).map((name) => make("option", { value: name }, name)));
    if (chosen && JSON.parse(models).includes(chosen)) select.value = chosen;
    if (!now.has_chat_template) $("ask").elements.kind.value = "completion";
  }
}

// ------------------------------------------------------------------------------- requests

const headers = (more = {}) => ({ Authorization: `Bearer ${key}`, ...more });
const problem = async (reply) => {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `The server answered ${reply.status}.`;
  }
};

function enter(words = "") {
  clearTimeout(timer);
  key = null;
  sessionStorage.removeItem(KEY);
  history = [];
  known = "";
  for (const part of document.querySelectorAll(".live")) part.hidden = true;
  document.querySelector("h1").textContent = "A served and finetuned model";
  document.title = "pcg serve";
  $("answer").textContent = "";
  $("enter").hidden = false;
  document.querySelector(".said").textContent = words;
}

async function refresh() {
  clearTimeout(timer);
  if (!key) return;
  const asked = key;
  try {
    const reply = await fetch("status", { headers: headers(), cache: "no-store" });
    if (asked !== key) return;
    if (reply.status === 401 || reply.status === 403) return enter(await problem(reply));
    if (!reply.ok) throw new Error(await problem(reply));
    const now = await reply.json();
    const before = history[history.length - 1];
    if (before && now.started_s !== before.started_s) history = [];
    history = [...history.filter((one) => now.time_s - one.time_s < KEPT), now];
    $("enter").hidden = true;
    for (const part of document.querySelectorAll(".live")) part.hidden = false;
    for (const part of document.querySelectorAll(".engine")) part.hidden = !now.engine;
    showServer(now);
    showNumbers(now, before);
    showChart();
    showLatencies(now);
    showTables(now);
  } catch (error) {
    if (asked !== key) return;
    if (history.length) {
      $("dot").className = "bad";
      text("state", `The server does not answer: ${error.message}`);
    } else document.querySelector(".said").textContent = `The server does not answer: ${error.message}`;
  }
  if (!document.hidden) timer = setTimeout(refresh, SECOND);
}

// Call `act` with the data of each event of a stream.
async function events(reply, act) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") act(JSON.parse(line.slice(6)));
    }
  }
}

async function ask(form) {
  const { model, kind, tokens, temperature, prompt } = form.elements, answer = $("answer");
  const isChat = kind.value === "chat", began = performance.now();
  const body = {
    model: model.value, max_tokens: Number(tokens.value), temperature: Number(temperature.value),
    stream: true, stream_options: { include_usage: true },
    ...(isChat ? { messages: [{ role: "user", content: prompt.value }] } : { prompt: prompt.value }),
  };
  let first = null, usage = null;
  asking = new AbortController();
  answer.className = "";
  answer.textContent = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  text("took", "waiting …");
  try {
    const reply = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body), signal: asking.signal,
    });
    if (!reply.ok) throw new Error(await problem(reply));
    await events(reply, (event) => {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const [choice] = event.choices || [];
      const said = choice && (isChat ? choice.delta.content : choice.text);
      if (!said) return;
      first ??= performance.now();
      answer.append(said);
      answer.scrollTop = answer.scrollHeight;
      text("took", `first token after ${seconds((first - began) / 1000)}`);
    });
    const took = (performance.now() - (first ?? began)) / 1000, made = usage ? usage.completion_tokens : 0;
    const speed = made > 1 && took > 0 ? `, then ${((made - 1) / took).toFixed(1)} tokens per second` : "";
    text("took", `${made} tokens; the first after ${seconds(first === null ? null : (first - began) / 1000)}${speed}`);
  } catch (error) {
    const wasStopped = error.name === "AbortError";
    text("took", wasStopped ? "stopped" : "");
    if (!wasStopped) {
      answer.className = "bad";
      answer.append(answer.textContent ? "\n" : "", error.message);
    }
  } finally {
    $("send").disabled = false;
    $("stop").disabled = true;
    asking = null;
  }
}

$("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  document.querySelector(".said").textContent = "";
  sessionStorage.setItem(KEY, key);
  refresh();
});
$("leave").addEventListener("click", () => { asking?.abort(); enter(); });
$("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!asking) ask(event.target); });
$("stop").addEventListener("click", () => asking?.abort());
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
