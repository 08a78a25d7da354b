// The script of static pages: titles of hovered elements, and the filter of tensors.
"use strict";
document.documentElement.classList.add("js");

// Show the title of the hovered or tapped element, as phones have no tooltips.
for (const figure of document.querySelectorAll("figure")) {
  const line = figure.querySelector(".readout");
  if (!line) continue;
  const idle = line.textContent;
  const show = (event) => {
    const title = event.target.closest(".point")?.querySelector("title");
    line.textContent = title ? title.textContent : idle;
  };
  figure.addEventListener("pointerover", show);
  figure.addEventListener("click", show);
}

// A graph wider than the page starts where most of its nodes are.
for (const box of document.querySelectorAll("#graph .scroll")) {
  const middle = (part) => part.getBoundingClientRect().x + part.getBoundingClientRect().width / 2;
  const nodes = [...box.querySelectorAll(".point")];
  box.scrollLeft += nodes.reduce((sum, node) => sum + middle(node), 0) / nodes.length - middle(box);
}

// Filter the tensors, also from the address: #show=save,compress
const form = document.querySelector("form.filter");
if (form) {
  const rows = [...document.querySelectorAll("tr[data-decision]")];
  const groups = [...document.querySelectorAll("table.tensors tbody")];
  const said = form.querySelector("output");
  const apply = () => {
    const boxes = [...form.querySelectorAll("input[type=checkbox]")];
    const chosen = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const words = form.elements.words.value.trim().toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !chosen.has(row.dataset.decision) || !words.every((w) => text.includes(w));
    }
    for (const group of groups) {
      group.hidden = !group.querySelector("tr[data-decision]:not([hidden])");
    }
    const shown = rows.filter((row) => !row.hidden).length;
    said.textContent = `${shown} of ${rows.length} tensors`;
  };
  const follow = () => {
    const asked = /^#show=([a-z,]*)$/.exec(location.hash);
    if (asked) {
      const chosen = asked[1].split(",");
      for (const box of form.querySelectorAll("input[type=checkbox]")) {
        box.checked = chosen.includes(box.value);
      }
    }
    apply();
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", follow);
  follow();
}
