"""How the page looks: light, dark and printed; from 360 pixels on."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --raised: #f3f4f1; --ink: #1d2127; --soft: #59616c; --rule: #dcdfe2;
  --link: #2a5fa5;
  --weights: #818c9c; --adapters: #3f7cc4; --gradients: #2b9c91; --optimizer: #7a64b4;
  --kv_cache: #ad841a; --activations: #c9573a; --workspace: #e9a78d; --other: #8892a0;
  --save: #1f5ba3; --save-in: #e2ecf8; --compress: #0f6b59; --compress-in: #dcf1ea;
  --recompute: #8a4d05; --recompute-in: #fbecd6; --drop: #5d646e; --drop-in: transparent;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --raised: #1c2026; --ink: #e4e7ea; --soft: #9ba5b1; --rule: #2e343c;
    --link: #8ab8f0;
    --weights: #677180; --adapters: #5f9be0; --gradients: #3fb0a4; --optimizer: #9d8ae0;
    --kv_cache: #cda443; --activations: #cd674a; --workspace: #7a4c3d; --other: #69737f;
    --save: #9cc5f5; --save-in: #1b304b; --compress: #7fd6bf; --compress-in: #12382f;
    --recompute: #f0b873; --recompute-in: #40290d; --drop: #9ba5b1; --drop-in: transparent;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 3.5rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1rem 3rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word;
}
code { font: 0.92em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
h1 { font-size: clamp(1.4rem, 5vw, 2.1rem); line-height: 1.2; margin: 0; letter-spacing: -0.015em; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 0.6rem; letter-spacing: -0.005em; }
p { margin: 0 0 0.9rem; max-width: 46rem; }
section { margin-top: 3.25rem; }
section > p { color: var(--soft); }
figure { margin: 0 0 1rem; }
a { color: var(--link); text-underline-offset: 0.2em; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: 3px; }
[hidden] { display: none !important; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.aside { color: var(--soft); font-weight: 400; font-size: 0.86rem; }
.kicker { color: var(--soft); font-size: 0.86rem; letter-spacing: 0.04em; margin: 0 0 0.3rem; }

.facts { display: flex; flex-wrap: wrap; gap: 0.7rem 2rem; margin: 1.1rem 0 0; }
dt { color: var(--soft); font-size: 0.8rem; }
dd { margin: 0; }
.keys {
  list-style: none; margin: 1.75rem 0 0; padding: 0; display: grid; gap: 1px;
  grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr));
  background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden;
}
.keys li { background: var(--paper); padding: 0.9rem 1rem; display: flex; flex-direction: column; }
.keys strong { font-size: 1.5rem; line-height: 1.25; font-weight: 600; letter-spacing: -0.01em; }
nav {
  position: sticky; top: 0; z-index: 2; background: var(--paper); margin: 1.75rem -1rem 0;
  padding: 0.55rem 1rem; display: flex; gap: 0.2rem 1.25rem; overflow-x: auto;
  border-bottom: 1px solid var(--rule); white-space: nowrap;
}
nav a { font-size: 0.9rem; text-decoration: none; }
nav a:hover { text-decoration: underline; }

table { border-collapse: collapse; width: 100%; font-size: 0.94rem; }
th, td { text-align: left; vertical-align: top; padding: 0.42rem 0.7rem 0.42rem 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 400; font-size: 0.8rem; vertical-align: bottom; }
tbody th { font-weight: 400; }
tbody tr { border-top: 1px solid var(--rule); }
tbody th .aside { margin-left: 0.6rem; }
.n { text-align: right; white-space: nowrap; }
thead .n { white-space: normal; }
.sum th, .sum td { font-weight: 600; }
.scroll { overflow-x: auto; overscroll-behavior-x: contain; }
details { margin-top: 0.5rem; }
summary { cursor: pointer; color: var(--link); font-size: 0.9rem; padding: 0.2rem 0; }
details .scroll { max-height: 22rem; overflow-y: auto; max-width: 34rem; }
details thead th { position: sticky; top: 0; background: var(--paper); }
tr.chosen th, tr.chosen td { font-weight: 600; }

.swatch {
  display: inline-block; width: 0.75em; height: 0.75em; border-radius: 2px; margin-right: 0.5em;
  background: var(--c); print-color-adjust: exact; -webkit-print-color-adjust: exact;
}
.swatch.k-workspace { box-shadow: inset 0 0 0 1.5px var(--activations); }
.k-weights { --c: var(--weights); } .k-adapters { --c: var(--adapters); }
.k-gradients { --c: var(--gradients); } .k-optimizer { --c: var(--optimizer); }
.k-kv_cache { --c: var(--kv_cache); } .k-activations { --c: var(--activations); }
.k-workspace { --c: var(--workspace); }
svg { display: block; fill: var(--c); }
svg text { fill: var(--soft); font-size: 12px; }
svg text.strong { fill: var(--ink); }
rect, polygon { fill: var(--c); }
.stack { width: 100%; height: 2.6rem; border-radius: 6px; overflow: hidden; }
.stack rect { stroke: var(--paper); stroke-width: 1; }
.bar { width: 100%; height: 0.6rem; margin-top: 0.35rem; }
.bar .ours { fill: var(--activations); }
.bar .other { fill: var(--other); }
.stages th:first-child { width: 62%; }
.stages th .aside { margin-left: 0.6rem; }

.frame { padding: 1.4rem 0.6rem 3rem 3.2rem; }
.plot { width: 100%; height: 17.5rem; overflow: visible; }
.plot svg { overflow: visible; }
.plot .at { width: 1px; height: 1px; }
.grid { stroke: var(--rule); }
.edge {
  fill: none; stroke: var(--activations); stroke-width: 1; vector-effect: non-scaling-stroke;
}
.hit { fill: var(--ink); fill-opacity: 0; }
.js .hit:hover { fill-opacity: 0.14; }
.dot { fill: var(--paper); stroke: var(--ink); stroke-width: 2; pointer-events: none; }
.front {
  fill: none; stroke: var(--activations); stroke-width: 2; vector-effect: non-scaling-stroke;
}
.peers {
  fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4;
  vector-effect: non-scaling-stroke;
}
.peer { fill: var(--soft); stroke: var(--paper); stroke-width: 1; }
.leader { stroke: var(--soft); }
.shape { display: inline-block; width: 1.05em; height: 1.05em; margin: 0 0.45em -0.15em 0; }
.corner { fill: var(--activations); stroke: var(--paper); stroke-width: 1; }
.named { fill: var(--paper); stroke: var(--ink); stroke-width: 1.75; }
.chosen {
  fill: var(--activations); fill-opacity: 0.25; stroke: var(--activations); stroke-width: 2.5;
}
svg text.name {
  fill: var(--ink); font-size: 13px; paint-order: stroke; stroke: var(--paper); stroke-width: 3px;
}
.legend { color: var(--soft); font-size: 0.88rem; margin: 0 0 0.4rem; max-width: none; }
.legend .swatch { margin-left: 0.2em; }
.legend .entry { display: inline-block; margin: 0 1.4rem 0.4rem 0; }
.rule {
  display: inline-block; width: 1.6em; border-top: 2px solid var(--activations);
  vertical-align: middle; margin-right: 0.6em;
}
.rule.dashed { border-top: 2px dashed var(--soft); }
.readout { display: none; }
.js .readout {
  display: block; font-size: 0.88rem; color: var(--ink); background: var(--raised); max-width: none;
  border-radius: 6px; padding: 0.45rem 0.75rem; margin: 0.4rem 0 0; min-height: 2.3rem;
}
#graph .readout { position: sticky; bottom: 0.5rem; }

.badge {
  display: inline-block; border: 1px solid var(--b); background: var(--f); color: var(--b);
  border-radius: 5px; padding: 0 0.45em; font-size: 0.82rem; line-height: 1.5; white-space: nowrap;
  print-color-adjust: exact; -webkit-print-color-adjust: exact;
}
.d-save { --b: var(--save); --f: var(--save-in); }
.d-compress { --b: var(--compress); --f: var(--compress-in); }
.d-recompute { --b: var(--recompute); --f: var(--recompute-in); }
.d-drop { --b: var(--drop); --f: var(--drop-in); }
.badge.d-compress { border: 3px double var(--b); line-height: 1.25; }
.badge.d-recompute { border-style: dashed; }
.badge.d-drop { border-color: var(--rule); }

.filter {
  display: flex; flex-wrap: wrap; align-items: center; gap: 0.6rem 1.2rem; margin: 0 0 0.9rem;
}
.filter fieldset {
  border: 0; padding: 0; margin: 0; min-width: 0; display: flex; flex-wrap: wrap;
  align-items: center; gap: 0.4rem 1rem;
}
.filter legend { float: left; color: var(--soft); font-size: 0.88rem; padding: 0; }
.filter label { display: inline-flex; align-items: center; gap: 0.4rem; min-height: 1.9rem; }
.filter .count, .filter output { color: var(--soft); font-size: 0.86rem; }
.filter input[type=checkbox] {
  width: 1.05rem; height: 1.05rem; margin: 0; accent-color: var(--link);
}
.filter input[type=search] {
  font: inherit; font-size: 0.9rem; color: inherit; background: var(--raised); min-width: 0;
  border: 1px solid var(--rule); border-radius: 6px; padding: 0.3rem 0.6rem; width: 14rem;
}
.tensors { font-size: 0.86rem; }
.tensors th, .tensors td { padding-right: 1.1rem; white-space: nowrap; }
.tensors tbody .aside { display: block; margin: 0; font-size: 0.8rem; }
.tensors .group th { padding: 1.3rem 0 0.5rem; font-size: 0.92rem; color: var(--soft); }
.tensors .group code { color: var(--ink); }
.tensors .stay { position: sticky; left: 0; }
.tensors tbody:first-of-type .group { border-top: 0; }
.tensors .list { white-space: normal; min-width: 12.5rem; }
.tensors .list span { display: block; }
.tensors .words { white-space: normal; min-width: 16rem; }

.block { margin: 0 auto; }
.block .edges path { fill: none; stroke: var(--other); stroke-width: 1.25; }
.node rect { fill: var(--paper); stroke: var(--b); stroke-width: 1.25; }
.node.d-save rect { fill: var(--f); stroke-width: 1.75; }
.node.d-compress rect { fill: var(--f); stroke-width: 3.5; }
.node.d-recompute rect { fill: var(--f); stroke-dasharray: 5 3; stroke-width: 1.5; }
.node.d-drop rect { stroke: var(--other); }
.node text { text-anchor: middle; }
.node .value {
  font: 600 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink);
}
.node.d-drop .value { font-weight: 400; fill: var(--soft); }
.node .op { font-size: 10.5px; }
.js .node:hover rect { stroke: var(--ink); }

.formulas { display: grid; gap: 0.9rem; margin: 0; }
.formulas code, #notes li { overflow-wrap: anywhere; }
#notes ul { padding-left: 1.2rem; margin: 0; max-width: 46rem; }
footer { color: var(--soft); font-size: 0.82rem; margin-top: 3.5rem; }

@media (max-width: 40rem) {
  tbody th .aside, .stages th .aside { display: block; margin-left: 0; line-height: 1.3; }
  .stages th:first-child { width: auto; }
  .keys strong { font-size: 1.25rem; }
  .keys { grid-template-columns: 1fr 1fr; }
  .keys li { padding: 0.75rem 0.8rem; }
  .filter input[type=search] { width: 100%; }
  .tensors .list { white-space: nowrap; }
  .tensors .words { min-width: 21rem; }
  .tensors .group th { font-size: 0.86rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .filter, .js .readout, details:not([open]) { display: none; }
  section { margin-top: 1.6rem; }
  h2, summary { break-after: avoid; }
  figure, tr, .keys, .facts { break-inside: avoid; }
  .scroll { overflow: visible; max-height: none !important; }
  .tensors { font-size: 6.5pt; }
  .tensors th, .tensors td { white-space: normal; padding: 0.2rem 0.5rem 0.2rem 0; }
  .tensors .words { min-width: 0; }
  .tensors .badge, .tensors tbody .aside, .tensors thead th { font-size: inherit; }
  .tensors .group th { padding: 0.8rem 0 0.2rem; font-size: inherit; }
  .block { max-width: 100%; height: auto; max-height: 24cm; }
}
"""
